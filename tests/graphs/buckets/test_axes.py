import copy
import pickle

import pytest

from graphs import Axis, Bucket, BucketOverflow


def test_a_bucket_reads_like_a_mapping_and_by_attribute():
    bucket = Bucket(tokens=256, shared=64)
    assert bucket["tokens"] == bucket.tokens == 256
    assert dict(bucket) == {"tokens": 256, "shared": 64}
    assert list(bucket) == ["tokens", "shared"]
    assert bucket.get("logits", 7) == 7
    assert str(bucket) == "tokens=256 shared=64"
    assert eval(repr(bucket), {"Bucket": Bucket}) == bucket


def test_equal_buckets_are_one_dictionary_key():
    counts = {Bucket(a=1, b=2): "first"}
    assert counts[Bucket(a=1, b=2)] == "first"
    assert Bucket(a=1, b=2) != Bucket(a=2, b=1)
    assert Bucket(a=1, b=2) != Bucket(a=1, c=2)
    assert Bucket(a=1) != {"a": 1}


def test_a_bucket_cannot_be_changed():
    bucket = Bucket(tokens=1)
    with pytest.raises(AttributeError, match="immutable"):
        bucket.tokens = 2
    with pytest.raises(TypeError):
        bucket["tokens"] = 2
    assert bucket.tokens == 1


def test_a_bucket_survives_pickle_and_copy():
    bucket = Bucket(tokens=3, shared=0)
    assert pickle.loads(pickle.dumps(bucket)) == bucket
    assert copy.deepcopy(bucket) == bucket


def test_an_unknown_axis_of_a_bucket_is_named():
    with pytest.raises(KeyError, match="no axis 'rows'; axes are tokens"):
        Bucket(tokens=1)["rows"]
    with pytest.raises(AttributeError, match="rows"):
        _ = Bucket(tokens=1).rows


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ({}, ValueError, "at least one axis"),
        ({"tokens": -1}, ValueError, "tokens=-1 is negative"),
        ({"tokens": 1.5}, TypeError, "tokens=1.5 is not a whole number"),
        ({"tokens": "8"}, TypeError, "tokens='8' is not a whole number"),
    ],
)
def test_a_bucket_of_impossible_sizes_is_refused(sizes, error, text):
    with pytest.raises(error, match=text):
        Bucket(**sizes)


@pytest.mark.parametrize("name", ["two words", "1st", "", "_private", "items", "sizes"])
def test_an_axis_needs_a_name_that_can_be_a_keyword(name):
    with pytest.raises(ValueError, match="not usable"):
        Axis(name, 0, 1)


@pytest.mark.parametrize(("low", "high"), [(-1, 4), (5, 4)])
def test_an_axis_needs_a_range_that_is_not_empty(low, high):
    with pytest.raises(ValueError, match="expected 0 <= low <= high"):
        Axis("tokens", low, high)


def test_an_overflow_carries_the_need_and_the_largest_bucket():
    error = BucketOverflow({"tokens": 300}, Bucket(tokens=256))
    assert error.need == {"tokens": 300}
    assert error.largest == Bucket(tokens=256)
    assert str(error) == (
        "need tokens=300 fits no bucket, the largest is tokens=256; "
        "cut the step into smaller ones, or add a larger bucket"
    )
