"""OpenVINO's PagedAttention on the CPU ignores ALiBi slopes where `sliding_window` is set.

Needs openvino alone. The result for one query over two keys, of which the window hides none, is
that without slopes.

Seen with openvino 2026.4.1 (x86-64).
"""

import numpy
import openvino
from openvino import opset13
from openvino.op import _PagedAttentionExtension

INPUTS = {
    "query": 2, "key": 2, "value": 2, "key_cache": 4, "value_cache": 4, "past_lens": 1,
    "subsequence_begins": 1, "block_indices": 1, "block_indices_begins": 1, "scale": 0,
    "sliding_window": 0, "alibi_slopes": 1, "max_context_len": 0, "score_aggregation_window": 1,
    "rotated_block_indices": 1, "rotation_deltas": 1, "rotation_trig_lut": 1,
    "xattention_threshold": 1, "xattention_block_size": 0, "xattention_stride": 0, "sinks": 1,
    "adaptive_rkv_start_size": 0, "adaptive_rkv_evictable_sizes": 1,
    "adaptive_rkv_diversity_block_set_indices": 1,
    "adaptive_rkv_diversity_block_set_indices_begins": 1, "token_type_ids": 1, "qq_bias": 1,
    "qq_bias_begins": 1,
}  # fmt: skip
FLOATS = {"query", "key", "value", "key_cache", "value_cache", "scale", "alibi_slopes"}
FLOATS |= {"rotation_trig_lut", "xattention_threshold", "sinks"}
SHAPES = {"query": [-1, 64], "key": [-1, 64], "value": [-1, 64]}
SHAPES |= {"key_cache": [-1, 1, 32, 64], "value_cache": [-1, 1, 32, 64]}
TYPES = {"qq_bias": openvino.Type.u8}

parameters = []
for name, rank in INPUTS.items():
    kind = openvino.Type.f32 if name in FLOATS else TYPES.get(name, openvino.Type.i32)
    parameters.append(opset13.parameter(SHAPES.get(name, [-1] * rank), kind, name))
    parameters[-1].output(0).get_tensor().set_names({name})
node = _PagedAttentionExtension([each.output(0) for each in parameters])
for name, size in {
    "num_k_heads": 1,
    "k_head_size": 64,
    "num_v_heads": 1,
    "v_head_size": 64,
}.items():
    node.get_rt_info()[name] = size
model = openvino.Model([node.output(0)], parameters, "pa")
options = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}
request = openvino.Core().compile_model(model, "CPU", options).create_infer_request()


def attend(window: int, slope: float) -> numpy.ndarray:
    random = numpy.random.default_rng(0)
    cache = random.standard_normal((2, 1, 32, 64))
    given = {
        "query": random.standard_normal((1, 64)), "key": cache[1, :, 1], "value": cache[1, :, 1],
        "key_cache": cache, "value_cache": cache, "past_lens": [1], "subsequence_begins": [0, 1],
        "block_indices": [1], "block_indices_begins": [0, 1], "scale": 0.125,
        "sliding_window": window, "alibi_slopes": [slope], "max_context_len": 2,
    }  # fmt: skip
    for port in request.model_inputs:
        value = given.get(port.any_name, numpy.zeros([0] * len(port.partial_shape)))
        array = numpy.array(value, dtype=port.element_type.to_dtype())
        request.set_tensor(port, openvino.Tensor(array))
    request.infer()
    return request.get_output_tensor(0).data.copy()


print(openvino.__version__)
full, windowed = attend(0, 0.5), attend(2, 0.5)
print("no window, slope 0.5 ", full[0, :4])
print("window 2,  slope 0.5 ", windowed[0, :4])
print("window 2,  slope 0   ", attend(2, 0.0)[0, :4])
numpy.testing.assert_allclose(windowed, full, rtol=1e-5)
