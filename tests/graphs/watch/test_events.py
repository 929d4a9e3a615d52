from graphs import CompileEvent


def test_an_event_reads_as_one_line():
    event = CompileEvent("recompile", "decode", "model.py", 7, "tensor 'x' size mismatch", 0)
    assert str(event) == "recompile of decode (model.py:7): tensor 'x' size mismatch"
    assert str(CompileEvent("capture", "decode", "", 0, "", 0)) == "capture of decode"
