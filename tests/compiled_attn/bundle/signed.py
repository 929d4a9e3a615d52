"""Bundles whose files were changed and signed again, as someone would who edits one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compiled_attn.bundle import folder
from graphs.files import digest_of, files_in


def sign(bundle: Path, content: Any) -> None:
    """Writes a manifest and its digest."""
    (bundle / folder.MANIFEST).write_text(json.dumps(content))
    (bundle / folder.DIGEST).write_text(digest_of(bundle / folder.MANIFEST))


def change_manifest(bundle: Path, **changes: Any) -> None:
    """Changes fields of the manifest."""
    sign(bundle, json.loads((bundle / folder.MANIFEST).read_text()) | changes)


def change_json(bundle: Path, name: str, **changes: Any) -> None:
    """Changes fields of another file."""
    found = json.loads((bundle / name).read_text()) | changes
    (bundle / name).write_text(json.dumps(found))
    files = {name: digest_of(path) for name, path in files_in(bundle).items()}
    change_manifest(
        bundle, files={k: v for k, v in files.items() if k not in (folder.MANIFEST, folder.DIGEST)}
    )
