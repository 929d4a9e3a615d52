"""Tags of tokens: the same for the same tokens, however they arrive, and for nothing else."""

from __future__ import annotations

import numpy as np

from compiled_attn.testing.sanitizer.lineage import Lineage, _all_mixed, _mixed

TOKENS = np.random.default_rng(0).integers(0, 2**40, 300).tolist()


def whole(tokens: list[int], salt: object = None) -> Lineage:
    lineage = Lineage("a", salt)
    lineage.extend(tokens, len(tokens))
    return lineage


def test_numbers_are_mixed_alike_in_python_and_numpy() -> None:
    numbers = [0, 1, 2**63, 2**64 - 1, 12345678901234567890]
    assert _all_mixed(np.array(numbers, np.uint64)).tolist() == [*map(_mixed, numbers)]


def test_tags_do_not_depend_on_chunks() -> None:
    lineage, tokens = Lineage("a"), TOKENS
    for end in (1, 2, 3, 9, 10, 200, 201, 300):
        lineage.extend(tokens, end)
        lineage.extend(tokens, end - 1)  # nothing new
    assert lineage.tags == whole(tokens).tags
    assert min(lineage.tags) > 0
    assert len({*lineage.tags}) == 300
    assert [lineage.position(tag) for tag in lineage.tags] == [*range(300)]
    assert lineage.position(0) is None


def test_tags_depend_on_salt_position_and_all_tokens_before() -> None:
    tags = whole(TOKENS).tags
    assert not {*whole(TOKENS, "salt").tags} & {*tags}
    changed = [*TOKENS]
    changed[7], changed[8] = changed[8], changed[7]
    other = whole(changed).tags
    assert other[:7] == tags[:7]
    assert not {*other[7:]} & {*tags}
    assert len({*whole([3] * 50).tags}) == 50


def test_sums_may_begin_at_a_later_position() -> None:
    lineage = whole(TOKENS)
    weights = np.array(lineage.tags, np.int64) * (2 * np.arange(300) + 1)
    assert lineage.sums(20, 40, 12).tolist() == np.cumsum(weights[12:])[8:28].tolist()
    assert lineage.sums(40, 41, 40).tolist() == [weights[40]]


def test_sums_weigh_tags_by_position() -> None:
    lineage = whole(TOKENS)
    tags = np.array(lineage.tags, np.int64)
    expected = np.cumsum(tags * (2 * np.arange(300) + 1))
    for start, end in ((0, 10), (10, 11), (50, 300), (11, 12)):
        assert lineage.sums(start, end).tolist() == expected[start:end].tolist()


def test_positions_that_are_cut_get_the_tags_of_other_tokens() -> None:
    lineage, other = whole(TOKENS), [*TOKENS[:120], *TOKENS[100:200]]
    assert lineage.cut(300).tolist() == []
    assert lineage.cut(120).tolist() == whole(TOKENS).tags.tolist()[120:]
    for end in (121, 220):
        lineage.extend(other, end)
    assert lineage.tags == whole(other).tags
    assert len(lineage.steps) == 220
    assert lineage.sums(119, 220).tolist() == whole(other).sums(119, 220).tolist()
