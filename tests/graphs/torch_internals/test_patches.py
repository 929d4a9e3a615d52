from __future__ import annotations

import threading

import pytest

from graphs.torch_internals.features import Patch, SharedPatch


class Owner:
    value = 1

    @staticmethod
    def ask():
        return "own"


class Heir(Owner):
    pass


def patched(owner=Owner):
    return SharedPatch(
        lambda: [Patch(owner, "value", 2), Patch(owner, "ask", staticmethod(lambda: "other"))]
    )


@pytest.mark.parametrize("owner", [Owner, Heir])
def test_attributes_are_replaced_inside_and_are_what_they_were_afterwards(owner):
    before = dict(vars(owner))
    patch = patched(owner)
    for _ in range(2):
        with patch:
            assert (owner.value, owner.ask()) == (2, "other")
        assert dict(vars(owner)) == before


def test_the_last_thread_that_leaves_restores_them():
    patch, entered, left = patched(), threading.Event(), threading.Event()

    def stay():
        with patch:
            entered.set()
            left.wait()

    thread = threading.Thread(target=stay)
    with patch:
        thread.start()
        entered.wait()
    assert Owner.value == 2
    left.set()
    thread.join()
    assert Owner.value == 1


def test_what_was_replaced_is_restored_where_a_later_attribute_fails():
    patch = SharedPatch(lambda: [Patch(Owner, "value", 2), Patch(1, "no_such", 3)])
    with pytest.raises(AttributeError), patch:
        pass
    assert Owner.value == 1
    with pytest.raises(AttributeError), patch:  # it is tried again
        pass
    assert Owner.value == 1
