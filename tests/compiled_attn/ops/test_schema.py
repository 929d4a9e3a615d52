"""The schemas of the ops: those of the C++ sources."""

from __future__ import annotations

from compiled_attn.ops.schema import schemas


def test_the_schemas_come_from_the_cpp_sources():
    attention, linear = {"paged_attention", "paged_attention_"}, {"packed_linear", "packed_rows"}
    assert set(schemas()) == attention | linear
    for name, text in schemas().items():
        assert "\n" not in text and text.endswith("Tensor" if name in linear else "lse)")
