from __future__ import annotations

from compiled_attn.testing.fuzz import Settings, Target, generate
from compiled_attn.testing.fuzz.ours import Ours


def test_traces_are_seeded():
    traces = [generate(seed, Ours, 50) for seed in range(20)]
    assert traces == [generate(seed, Ours, 50) for seed in range(20)]
    assert len({trace.to_json() for trace in traces}) == 20


def test_requests_fit_and_ids_are_unique():
    for seed in range(50):
        trace = generate(seed, Ours, 50)
        settings = trace.settings
        assert settings.num_blocks * settings.block_size >= settings.context
        assert settings.max_tokens >= settings.max_seqs
        ids = []
        for each in trace.operations:
            if each.new_tokens:
                assert each.prompt
                assert each.keep + len(each.prompt) + each.new_tokens <= settings.context
                ids += range(each.request, each.request + each.count)
        assert len(ids) == len({*ids}) >= 50


def test_everything_happens_that_a_target_supports():
    def kinds(target):
        return {each.kind for n in range(40) for each in generate(n, target, 50).operations}

    assert kinds(Ours) == {"submit", "share", "step"} | (Ours.supports - {"salt", "sample"})
    assert kinds(Target) == {"submit", "share", "step"}
    operations = [each for seed in range(40) for each in generate(seed, Ours, 50).operations]
    assert any(each.salt for each in operations) and any(each.seed for each in operations)


def test_settings_can_be_given():
    settings = Settings(context=8)
    assert generate(0, Ours, 5, settings).settings == settings
