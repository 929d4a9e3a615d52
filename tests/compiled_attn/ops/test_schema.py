"""The schemas of the ops: those of the C++ sources."""

from __future__ import annotations

from compiled_attn.ops.schema import schemas


def test_the_schemas_come_from_the_cpp_sources():
    attention = {"paged_attention", "paged_attention_"}
    others = {"packed_linear", "packed_linears", "packed_gated", "packed_rows", "drawn_tokens"}
    assert set(schemas()) == attention | others
    for name, text in schemas().items():
        assert "\n" not in text and text.endswith(
            ("Tensor", "Tensor[]") if name in others else "lse)"
        )
