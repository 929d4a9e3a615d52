from __future__ import annotations

import json
import shutil

import pytest

from compiled_attn.bundle import Bundle, BundleError, BundleMisfit, folder
from graphs.files import digest_of


@pytest.fixture
def copy(written, tmp_path):
    return shutil.copytree(written.folder, tmp_path / "copy")


def test_a_changed_byte_of_any_file_is_refused_in_one_line(written, copy):
    for path in sorted(copy.iterdir()):
        content = path.read_bytes()
        at = len(content) // 2
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(BundleError) as refused:
            Bundle(copy).check()
        message = str(refused.value)
        assert "\n" not in message
        assert path.name in message or path.name == folder.DIGEST
        path.write_bytes(content)
    Bundle(copy).check()


def test_a_missing_or_cut_file_is_refused(copy):
    for path in sorted(copy.iterdir()):
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(BundleError):
            Bundle(copy).check()
        path.unlink()
        with pytest.raises(BundleError, match=path.name):
            Bundle(copy).check()
        path.write_bytes(content)


def test_no_bundle_at_all(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(BundleError, match="expected a folder"):
            Bundle(path)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("machine", "aarch65", "a processor of kind aarch65"),
        ("features", ["avx9000", "fma"], "a processor with avx9000, got one without"),
        ("torch", "1.0", "torch 1.0"),
        ("version", "0", "compiled_attn 0"),
        ("format", 99, "got 99"),
    ],
)
def test_a_bundle_of_another_machine_says_what_differs(copy, field, value, expected):
    manifest = copy / folder.MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {field: value}))
    (copy / folder.DIGEST).write_text(digest_of(manifest))
    with pytest.raises(BundleMisfit, match=expected) as refused:
        Bundle(copy)
    assert "\n" not in str(refused.value)


def test_a_folder_that_others_can_change_is_refused(copy):
    copy.chmod(0o777)
    with pytest.raises(BundleError, match="cannot be read"):
        Bundle(copy)
