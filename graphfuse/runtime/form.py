"""Forms of variant packs: what execute knows of a pack it accepted, so that one like it is not looked at again.

A form is the keys of a pack and all that was checked of its values except addresses and
numbers: type, data type, shape, strides, device, layout. torch compares all of that in one
call (`TensorGuards`, with which torch.compile guards what it compiled) at a quarter of the
time that reading it takes. Torch tensors, addresses and plain numbers in a dict have a form;
any other pack is looked at in full every time.
"""

import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence

from graphfuse import ir
from graphfuse.ir import TensorId
from graphfuse.tensor import Tensor

_KEYS = {str, int, Tensor}

Key = tuple[int | float | str, ...]
"""Stream, dependent, addresses and numbers of one call: equal where a launch would be the same."""


class Guard:
    """Tells whether tensors are like those it was made from, wherever their memory is. Keeps none of them."""

    def __init__(self, tensors: Sequence[object]):
        guards = sys.modules["torch"]._C._dynamo.guards
        self.alike = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

    def locate(self, tensors: Sequence[object], found: list[object]) -> bool:
        """Add the tensors' addresses to `found`. False if one of them is not like its model, or no tensor at all."""
        try:
            for tensor in tensors:
                if tensor.is_nested:  # to compare one would end the process
                    return False
                found.append(tensor.data_ptr())
            return self.alike(*tensors)
        except (AttributeError, RuntimeError, TypeError):  # of no tensor, none with memory, another number of them
            return False


def guardable(value: object) -> bool:
    """Whether a guard can tell all of what a value is: a torch tensor of no class of its own."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return hasattr(torch._C._dynamo.guards, "TensorGuards")  # not promised by torch; without it, no pack has a form


def number(value: int | float) -> int | float | str:
    """What stands for a number in a key, where 0.0 and -0.0 must differ."""
    return value or repr(value)


class Form:
    """One form. Immutable.

    keys: of the pack, in its order. tensors, numbers: keys by the tensor of the graph whose value is a torch
    tensor, or an address or number. workspace: as it was given, None or a torch tensor.
    """

    def __init__(
        self,
        pack: Mapping[object, object],
        tensors: Mapping[TensorId, object],
        numbers: Mapping[TensorId, object],
        workspace: object,
    ):
        self._keys = [*pack]
        self._int_keys = int in map(type, pack)
        self._ids = (*tensors, *numbers)
        self._arrays = len(tensors)
        self._names = tuple(tensors.values())
        self._tensors = _values(self._names)
        self._numbers = _values(tuple(numbers.values()))
        self._kinds = tuple(type(value) for value in self._numbers(pack))
        self._has_workspace = workspace is not None
        given = self._tensors(pack)
        self._guard = Guard((*given, workspace) if self._has_workspace else given)

    def key(self, pack: object, workspace: object, stream: int, dependent: bool) -> Key | None:
        """The key of a pack of this form; None for any other pack."""
        if type(pack) is not dict or [*pack] != self._keys:
            return None
        if self._int_keys and not set(map(type, pack)) <= _KEYS:  # True and 1.0 equal 1 and are no keys
            return None
        tensors = self._tensors(pack)
        if self._has_workspace:
            tensors = (*tensors, workspace)
        elif workspace is not None:
            return None
        found = [stream, dependent]
        if not self._guard.locate(tensors, found):
            return None
        if self._kinds:
            for value, kind in zip(self._numbers(pack), self._kinds, strict=True):
                if type(value) is not kind:
                    return None
                found.append(number(value))
        return tuple(found)

    def quick(self, stream: Callable[[], int], known: Mapping[Key, object]) -> Callable[[object], object | None] | None:
        """What finds `known` under the key of a pack of this form, without a workspace and not dependent, on the
        stream of the moment; None for any other pack. It is `key` for the usual pack, in half the time; there is
        none (None) for packs with numbers or with uids as keys.
        """
        if self._kinds or self._has_workspace or self._int_keys or not self._arrays:
            return None
        return _quick(self._arrays)(len(self._keys), stream, known.get, self._guard.alike, *self._names)

    def given(self, pack: Mapping[object, object], key: Key) -> tuple[dict[TensorId, object], int]:
        """What ``Binder.place`` takes: addresses and numbers by tensor, and the address of the workspace."""
        addresses = key[2 : len(key) - len(self._kinds)]
        workspace = addresses[-1] if self._has_workspace else 0
        return dict(zip(self._ids, (*addresses[: self._arrays], *self._numbers(pack)), strict=True)), workspace


def form(pack: object, workspace: object, find: Callable[[object], ir.Tensor]) -> Form | None:
    """The form of a pack that has been accepted; None if it has none. find: the tensor that a key means."""
    if type(pack) is not dict or not (workspace is None or guardable(workspace)):
        return None
    tensors: dict[TensorId, object] = {}
    numbers: dict[TensorId, object] = {}
    for key, value in pack.items():
        if type(key) not in _KEYS:  # what it means may change
            return None
        tensor = find(key)
        if type(value) is int or (tensor.by_value and type(value) is float):
            numbers[tensor.id] = key
        elif not tensor.by_value and guardable(value):
            tensors[tensor.id] = key
        else:
            return None
    return Form(pack, tensors, numbers, workspace)


_QUICK = """
def quick(count, stream, get, alike, {names}):
    def find(pack):
        if type(pack) is dict and len(pack) == count:
            try:
                {values} = {taken}
                if {nested}:  # to compare one would end the process
                    return None
                calls = get((stream(), False, {addresses}))
                if calls is not None and alike({tensors}):
                    return calls
            except (KeyError, AttributeError, RuntimeError, TypeError):  # as `Guard.locate`, or other keys
                pass
        return None

    return find
"""


@functools.cache
def _quick(count: int) -> Callable[..., Callable[[object], object | None]]:
    """`Form.quick` for `count` tensors, whose keys are the last arguments. Written out: loops take twice as long."""
    numbers = range(count)
    text = _QUICK.format(
        names=", ".join(f"k{i}" for i in numbers),
        values=", ".join(f"t{i}" for i in numbers) + ",",
        taken=", ".join(f"pack[k{i}]" for i in numbers) + ",",
        nested=" or ".join(f"t{i}.is_nested" for i in numbers),
        addresses=", ".join(f"t{i}.data_ptr()" for i in numbers),
        tensors=", ".join(f"t{i}" for i in numbers),
    )
    made: dict[str, Callable] = {}
    exec(text, made)
    return made["quick"]


def _values(keys: tuple) -> Callable[[Mapping[object, object]], tuple]:
    """What takes the values of `keys` from a pack, as a tuple."""
    if not keys:
        return lambda pack: ()
    found = operator.itemgetter(*keys)
    return found if len(keys) > 1 else lambda pack: (found(pack),)
