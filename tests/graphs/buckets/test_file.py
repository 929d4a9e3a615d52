import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import Bucket, BucketFileError, explicit, from_file, linear, to_file


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "buckets.txt"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_file_gives_one_bucket_for_each_combination_of_a_line(written):
    space = from_file(
        written(
            "# made by hand\n"
            "version: 1\n"
            "axes: tokens shared\n"
            "\n"
            "(1, 0)          # a single decode\n"
            "range(2, 7, 2), [0, 4]\n"
            "[8, range(10, 12),], range(1)\n"
            "(1, 0,)\n"
        )
    )
    assert [b.sizes for b in space] == [
        *[(1, 0), (2, 0), (2, 4), (4, 0), (4, 4), (6, 0), (6, 4)],
        *[(8, 0), (10, 0), (11, 0)],
    ]
    assert space.names == ("tokens", "shared")


def test_the_header_may_stand_in_comments_and_the_version_be_left_out(written):
    assert list(from_file(written("# axes: a, b\n1, 2\n# axes: are above\n"))) == [Bucket(a=1, b=2)]
    assert list(from_file(written("#version: 1\n#axes: a\n7\n"))) == [Bucket(a=7)]


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path):
    path = tmp_path / "b.txt"
    path.write_bytes(b"\xef\xbb\xbfaxes: a\r\n1\r\n2\r\n")
    assert [b.a for b in from_file(path)] == [1, 2]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 99)), min_size=1, max_size=30))
def test_what_is_written_reads_back_the_same(tmp_path_factory, sizes):
    space = explicit(["tokens", "shared"], sizes)
    path = tmp_path_factory.mktemp("round") / "b.txt"
    to_file(space, path)
    assert from_file(path) == space


def test_writing_replaces_the_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "b.txt"
    path.write_text("old")
    to_file(linear(n=(1, 4, 8)), path)
    assert [b.n for b in from_file(path)] == [1, 2, 4, 8]
    assert [p.name for p in tmp_path.iterdir()] == ["b.txt"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1", "1 sizes; expected 2"),
        ("1, 2, 3", "3 sizes; expected 2"),
        ("1, -2", "size -2 is negative"),
        ("1, 2.5", "expected a whole number of at most 12 digits, got '2.5'"),
        ("1, x", "got 'x'"),
        ("1, ", "1 sizes; expected 2"),
        ("1, []", "got ']'"),
        ("1, [2", "expected ']', got the end of the line"),
        ("(1, 2", r"expected '\)', got the end of the line"),
        ("1, 2)", r"expected the end of the line, got '\)'"),
        ("1 2", "got '2'"),
        ("1, range(3, 3)", r"range\(3, 3\) is empty"),
        ("1, range(8, 2)", r"range\(8, 2\) is empty"),
        ("1, range(1, 8, 0)", "step >= 1"),
        ("1, range(1, 2, 3, 4)", "step >= 1"),
        ("1, range()", r"got '\)'"),
        ("1, range", r"expected '\(', got the end of the line"),
        ("1, 9999999999999", "at most 12 digits"),
        ("1, ٣", "got '٣'"),
        ("1, [[2]]", r"got '\['"),
        ("1, __import__('os')", "got '__import__'"),
        ("range(1000000), range(1000000)", "more than 100000 buckets"),
        ("axes: c d", "a second axes line"),
    ],
)
def test_a_bad_line_is_an_error_with_its_number_and_reason(written, line, reason):
    path = written(f"axes: a b\n1, 1\n{line}\n2, 2\n")
    with pytest.raises(BucketFileError, match=reason) as caught:
        from_file(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1, 2\n", "expected `axes: <names>` first"),
        ("axes:\n1\n", "expected the axes' names"),
        ("axes: a a\n1, 1\n", "each once"),
        ("version: 2\naxes: a\n1\n", "version 2 is newer than 1"),
        ("version: one\naxes: a\n1\n", "version is 'one'"),
        ("axes: a\n", "no bucket in it"),
        ("", "no bucket in it"),
        ("axes: two-words\n1\n", "not usable"),
    ],
)
def test_a_bad_header_says_what_is_expected(written, text, reason):
    with pytest.raises(BucketFileError, match=reason):
        from_file(written(text))


def test_a_missing_or_binary_file_is_a_bucket_file_error(tmp_path):
    with pytest.raises(BucketFileError, match="not readable"):
        from_file(tmp_path / "absent.txt")
    with pytest.raises(BucketFileError, match="not readable"):
        from_file(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(BucketFileError, match="not readable"):
        from_file(tmp_path / "binary")


@pytest.mark.parametrize(
    "text",
    [
        "axes: n\n" + "(" * 200_000,
        "axes: n\n" + "9" * 200_000,
        "axes: n\n" + "x" * 200_000,
        "version: " + "9" * 200_000,
        "version: " + "x" * 200_000,
        "axes: " + "n" * 200_000 + "\n1",
        "axes: " + " ".join(f"a{i}" for i in range(50_000)) + "\n1, 2",
    ],
    ids=["brackets", "digits", "letters", "version", "no version", "name", "names"],
)
def test_an_error_of_a_long_line_is_short(written, text):
    with pytest.raises(BucketFileError) as caught:
        from_file(written(text))
    assert len(str(caught.value)) < 500
