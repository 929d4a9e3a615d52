"""The setting is parsed, and refused with one line where it cannot work."""

from __future__ import annotations

import pytest

from compiled_attn.engine import EngineConfig
from compiled_attn.engine.speculation.setting import Speculation
from compiled_attn.errors import ConfigError
from tests.compiled_attn.engine.small import small_engine


def test_a_setting_has_a_source_and_a_length():
    assert Speculation.of("ngram:16") == Speculation(16)
    assert Speculation.of("model:/a:b/c:2") == Speculation(2, "/a:b/c")
    assert Speculation.of(None) is None
    assert EngineConfig(speculate="ngram:3").longest_draft == 3 and not EngineConfig().longest_draft


@pytest.mark.parametrize(
    "given", ["", "ngram", "ngram:", "ngram:0", "ngram:17", "ngrams:4", "model:4", 4]
)
def test_another_setting_is_refused(given):
    with pytest.raises(ConfigError, match=r"expected speculate as .* in 1\.\.16, got .*: write it"):
        EngineConfig(speculate=given)


def test_the_portable_kernel_is_refused():
    with pytest.raises(ConfigError, match="expected the native kernel with speculate 'ngram:4', g"):
        small_engine(speculate="ngram:4", kernel="portable")
