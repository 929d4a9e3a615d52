from __future__ import annotations

import json
import os
import shutil

import pytest

from compiled_attn.bundle import Bundle, BundleError, BundleMisfit, folder
from graphs.files import digest_of
from tests.compiled_attn.bundle.signed import change_manifest, sign


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
    (tmp_path / "file").touch()
    for path, got in (
        (tmp_path, "none with manifest.sha256"),
        (tmp_path / "none", "nothing of this name"),
        (tmp_path / "file", "a file"),
    ):
        with pytest.raises(BundleError, match=f"expected a folder .* got {got}: "):
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
    change_manifest(copy, **{field: value})
    with pytest.raises(BundleMisfit, match=expected) as refused:
        Bundle(copy)
    assert "\n" not in str(refused.value)


def test_a_folder_that_others_can_change_is_refused(copy):
    copy.chmod(0o777)
    with pytest.raises(BundleError, match="writable by others"):
        Bundle(copy)


@pytest.mark.parametrize("name", [folder.MANIFEST, folder.WEIGHTS, "library_0.so"])
def test_a_file_that_others_can_change_is_refused(copy, name):
    (copy / name).chmod(0o666)
    with pytest.raises(BundleError, match=rf"{name} is writable by others"):
        Bundle(copy).check()


@pytest.mark.parametrize("name", [folder.MANIFEST, folder.WEIGHTS, "library_0.so"])
def test_a_link_is_refused_whatever_it_points_to(written, copy, name):
    (copy / name).unlink()
    (copy / name).symlink_to(written.folder / name)
    with pytest.raises(BundleError, match=rf"{name} is neither a file nor a folder"):
        Bundle(copy)
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(BundleError, match=rf"{name} is neither a file nor a folder"):
        Bundle(copy)


def test_a_folder_may_be_found_by_a_link(copy, tmp_path):
    (tmp_path / "link").symlink_to(copy)
    Bundle(tmp_path / "link").check()


@pytest.mark.parametrize("name", ["more.so", "more/more.so"])
def test_a_file_that_the_manifest_does_not_name_is_refused(copy, name):
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).touch()
    with pytest.raises(BundleError, match=rf"got {name} too: remove it"):
        Bundle(copy)


def test_names_outside_the_folder_are_refused(copy, tmp_path):
    (tmp_path / "other.so").write_bytes(b"code")
    whole = json.loads((copy / folder.MANIFEST).read_text())
    for name in ("../other.so", str(tmp_path / "other.so"), "", "..", "a/../library_0.so"):
        files = whole["files"] | {name: digest_of(tmp_path / "other.so")}
        for changes in ({"files": files}, {"libraries": [name]}):
            change_manifest(copy, **(whole | changes))
            with pytest.raises(BundleError, match="expected names of files in the folder"):
                Bundle(copy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"libraries": []}, "lists of features and libraries"),
        ({"libraries": [["library_0.so"]]}, "expected texts"),
        ({"features": {}}, "lists of features"),
        ({"features": [{}]}, "expected texts"),
        ({"files": []}, "objects of files"),
        ({"engine": 3}, "objects of files and of sizes"),
        ({"isa": None}, "expected texts"),
        ({"threads": 0}, "1 to 4096 threads, got 0"),
        ({"threads": 10**9}, "1 to 4096 threads"),
        ({"threads": "2"}, "1 to 4096 threads, got '2'"),
        ({"more": 1}, "an object of its fields"),
    ],
)
def test_a_manifest_of_other_contents_is_refused(copy, changes, words):
    change_manifest(copy, **changes)
    with pytest.raises(BundleError, match=words) as refused:
        Bundle(copy)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [[], 3, None, "x", {"format": 2}])
def test_what_is_no_manifest_is_refused(copy, content):
    sign(copy, content)
    with pytest.raises(BundleError, match="an object of its fields"):
        Bundle(copy)
    (copy / folder.MANIFEST).write_text("[" * 100_000)
    (copy / folder.DIGEST).write_text(digest_of(copy / folder.MANIFEST))
    with pytest.raises(BundleError, match="cannot be read"):
        Bundle(copy)
