import pytest

from graphs.watch.guards import meaning_of, readable

CPU = "CPU, BackendSelect, ADInplaceOrView, AutogradCPU"


def keys(expected, actual):
    return (
        f"tensor 'x' dispatch key set mismatch. expected DispatchKeySet({expected}), "
        f"actual DispatchKeySet({actual})"
    )


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        ("GLOBAL_STATE changed: num_threads", "the thread count changed"),
        ("GLOBAL_STATE changed: autocast(cpu)_enabled", "autocast was switched on or off"),
        ("GLOBAL_STATE changed: new_one", "the setting new_one changed"),
        (
            keys(CPU, "CPU, BackendSelect"),
            "inference mode changed, for this call or for tensor 'x'",
        ),
        (
            keys(CPU, "CUDA, AutogradCUDA"),
            "tensor 'x' is on another device: expected cpu, actual cuda",
        ),
        (keys(CPU, f"{CPU}, Conjugate"), "tensor 'x' is of another kind (Conjugate)"),
        ("G['FACTOR'] == 2", "global FACTOR is no longer 2"),
        ("G['__import_a_dot_b'].TABLE['k'] == 2", "global a.b.TABLE['k'] is no longer 2"),
        ("self.items[0] == 1", "self.items[0] is no longer 1"),
        ("self.none is None", "self.none is no longer None"),
        ("function._modules['d'].training == True", "attribute d.training is no longer True"),
        ("___dict_contains('k', self.opt)", "whether 'k' is in self.opt has changed"),
        (
            "___check_obj_id(self.mode, 140580388775568), type=<enum>",
            "self.mode has another object",
        ),
        ("___check_type_id(s._modules['act'], 9435), type=<class 'A'>", "s.act has another type"),
        (
            "tensor 'w' requires_grad mismatch. expected requires_grad=1. Guard failed on a param",
            "tensor 'w' requires_grad mismatch. expected requires_grad=1",
        ),
        ("an unknown guard", "an unknown guard"),
    ],
)
def test_a_failed_guard_is_described_in_words(guard, words):
    meaning = meaning_of(guard)
    assert meaning.words == words
    assert meaning.remedy and "\n" not in meaning.remedy


@pytest.mark.parametrize(
    ("guard", "text"),
    [
        (
            "___check_type_id(L['self']._modules['a'], 94), type=<class 'x.Act'>",
            "self.a is a x.Act",
        ),
        ("___check_obj_id(L['self'].mode, 139), type=<class 'E'>", "self.mode is the same object"),
        ("G['FACTOR'] == 2", "global FACTOR == 2"),
        ("x is float32[2] on cpu", "x is float32[2] on cpu"),
    ],
)
def test_a_guard_that_holds_is_readable(guard, text):
    assert readable(guard) == text
