"""Layers with branches that each call decides by properties of a tensor: what stands around them is fused."""

import copy
import logging

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch import fuse
from support.dispatched import operators
from support.summing_layers import COLUMNS, Layer, drawn, made

pytestmark = pytest.mark.torch

LOGGER = logging.getLogger(__name__)


class Clamped(Layer):
    """As Bart's."""

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = residual + self.linear(hidden_states)
        hidden_states = self.norm(hidden_states)
        if hidden_states.dtype == torch.float16 and not torch.isfinite(hidden_states).all():
            clamp_value = torch.finfo(hidden_states.dtype).max - 1000
            hidden_states = torch.clamp(hidden_states, min=-clamp_value, max=clamp_value)
        return hidden_states


class Squeezed(Layer):
    """As diffusers' basic block."""

    def forward(self, hidden_states, attention_kwargs=None):
        if attention_kwargs is not None:
            if attention_kwargs.get("scale", None) is not None:
                LOGGER.warning("scale is ignored")
        attention_kwargs = attention_kwargs.copy() if attention_kwargs is not None else {}
        objects = attention_kwargs.pop("gligen", None)
        made = self.linear(hidden_states, **attention_kwargs)
        if made.ndim == 4:
            made = made.squeeze(1)
        if objects is not None:
            made = made + objects
        hidden_states = made + hidden_states
        return self.norm(hidden_states) + hidden_states


class TwoVariables(Layer):
    def forward(self, x):
        y, scale = self.linear(x), 2.0
        if y.shape[0] > 2:
            scale = 3.0
        elif y.shape[1] > 5:
            y = y[:, :5] * scale
            x = x[:, :5] if x.dim() == 3 else x
        total = x + y
        return self.norm(total) * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_finite", [True, False])
def test_a_branch_on_the_type_and_the_values(dtype, is_finite):
    layer, x = made(Clamped, dtype), drawn(2, 3, COLUMNS, dtype=dtype)
    if not is_finite:
        layer.norm.bias.data[3] = torch.inf
    with torch.no_grad():
        want = layer(x)
        assert "add, layernorm; with norm" in str(fuse(layer))
        assert operators(lambda: layer(x)) == ["region"]
        torch.testing.assert_close(layer(x), want)
        assert want.isfinite().all() == (is_finite or dtype is torch.float16)


def test_a_branch_on_the_rank_and_keywords_that_are_not_there():
    layer, own = made(Squeezed), made(Squeezed)
    assert "add, layernorm" in str(fuse(layer))
    for shape in ((2, 3, COLUMNS), (2, 1, 3, COLUMNS)):
        x = drawn(*shape)
        with torch.no_grad():
            assert operators(lambda x=x: layer(x)) == ["region"]
            torch.testing.assert_close(layer(x), own(x))
    x = drawn(2, 3, COLUMNS)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, {"gligen": drawn(COLUMNS)}), own(x, {"gligen": drawn(COLUMNS)}))
        with pytest.raises(TypeError, match="unexpected keyword"):
            layer(x, {"scale": 2})


@pytest.mark.parametrize("shape", [(2, 3, COLUMNS), (2, 7, COLUMNS), (3, 7, COLUMNS)])
def test_branches_that_assign_several_variables(shape):
    layer, own, x = made(TwoVariables), made(TwoVariables), drawn(*shape)
    assert "add, mul; with norm" in str(fuse(layer))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), own(x))
    for one in (layer, own):
        (made_of := one(x)).mul(drawn(*made_of.shape)).sum().backward()
    torch.testing.assert_close(layer.linear.weight.grad, own.linear.weight.grad)


def test_within_torch_compile():
    layer, x = made(Clamped), drawn(2, 3, COLUMNS)
    want = layer(x)
    fuse(layer)
    torch.testing.assert_close(torch.compile(layer, backend="eager")(x), want)


def _of_the_module(self, x):
    y = self.linear(x)
    if y.shape[0] > 2:
        y = y * self.most
    return self.norm(x + y)


def _in_place(self, x):
    y = self.linear(x)
    if y.shape[0] > 2:
        y = y.mul_(2)
    return self.norm(x + y)


def _with_a_call(self, x):
    y = self.linear(x)
    if y.shape[0] > 2:
        LOGGER.warning("large")
    return self.norm(x + y)


def _returns(self, x):
    y = self.linear(x)
    if y.shape[0] > 2:
        return y
    return self.norm(x + y)


def _reads_what_may_not_be_there(self, x):
    y = self.linear(x)
    if y.shape[0] > 2:
        z = y * 2
    return self.norm(x + z)


def _of_an_outer_variable(factor):
    def forward(self, x):
        y = self.linear(x)
        if y.shape[0] > 2:
            y = y * factor
        return self.norm(x + y)

    return forward


def _inner(**named):
    return named.pop("scale", None)


def _pops_from_keywords(self, x, **named):
    y = self.linear(x)
    if _inner(**named) is not None:
        y = y * 2
    return self.norm(x + y)


@pytest.mark.parametrize(
    "forward",
    [_of_the_module, _in_place, _with_a_call, _returns, _reads_what_may_not_be_there, _of_an_outer_variable(3.0)],
)
def test_other_branches_are_left(forward):
    layer = made(type("Other", (Layer,), {"forward": forward}))
    own = copy.deepcopy(layer)
    assert "add, layernorm" not in str(fuse(layer))
    for shape in ((2, 3, COLUMNS), (4, 3, COLUMNS)):
        with torch.no_grad():
            try:
                want = own(drawn(*shape))
            except UnboundLocalError:
                with pytest.raises(UnboundLocalError):
                    layer(drawn(*shape))
                continue
            torch.testing.assert_close(layer(drawn(*shape)), want)


def test_keywords_that_are_passed_on_are_not_known():
    layer, x = made(type("Other", (Layer,), {"forward": _pops_from_keywords})), drawn(2, 3, COLUMNS)
    own = copy.deepcopy(layer)
    fuse(layer)
    with torch.no_grad():
        for named in ({}, {"scale": 2}):
            torch.testing.assert_close(layer(x, **named), own(x, **named))


def test_an_activation_is_looked_up_in_each_call(monkeypatch):
    def forward(self, x):
        y = self.linear(x)
        if y.shape[0] > 1:
            y = F.relu(y)
        return self.norm(x + y)

    layer, x = made(type("Other", (Layer,), {"forward": forward})), drawn(2, 3, COLUMNS)
    own = copy.deepcopy(layer)
    assert "add, layernorm" in str(fuse(layer))
    monkeypatch.setattr(F, "relu", torch.nn.functional.gelu)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), own(x))


class Scaled(Layer):
    __private = 3.0

    def scaled(self, y):
        return y * 3

    def forward(self, x):
        raise NotImplementedError


class OfSuper(Scaled):
    def forward(self, x):
        y = self.linear(x)
        if y.shape[0] > 2:
            y = super().scaled(y)
        return self.norm(x + y)


class OfAPrivateName(Layer):
    __scale = 3.0

    def forward(self, x):
        y = self.linear(x)
        if y.shape[0] > 2:
            y = y * OfAPrivateName.__scale
        return self.norm(x + y)


def _shape_in_a_variable(self, x):
    y = self.linear(x)
    shape = y.shape
    if shape[0] > 2:
        y = y * 2
    return self.norm(x + y.reshape(shape))


def _shape_as_an_argument(self, x):
    y = self.linear(x)
    y = _doubled(y.shape, y)
    return self.norm(x + y)


def _doubled(shape, y):
    if shape[0] > 2:
        y = y * 2
    return y


def _name_of_an_earlier_branch(self, x):
    y = self.linear(x)
    if y.shape[0] > 2:
        scale = 2.0
        y = y * scale
    if y.shape[0] > 2:
        scale = scale + 1
        y = y * scale
    return self.norm(x + y)


def _dictionary_of_two_calls(self, x):
    cache = {}
    y = _filled(self.linear(x), cache)
    y = _filled(y, cache)
    return self.norm(x + y) + len(cache)


def _list_of_two_calls(self, x):
    cache = []
    y = _appended(self.linear(x), cache)
    y = _appended(y, cache)
    return self.norm(x + y) + len(cache)


def _filled(y, cache):
    for _ in range(1):
        cache[len(cache)] = y
    return y + len(cache)


def _appended(y, cache):
    for _ in range(1):
        cache.append(y)
    return y + len(cache)


def _flag(self, x):
    y, flag = self.linear(x), True
    if y.shape[0] > 2:
        flag = False
    if flag is True:
        y = y * 2
    return self.norm(x + y)


def _tensor_or_number(self, x):
    y, s = self.linear(x), 1.0
    if y.shape[0] > 2:
        s = y[:1]
    if torch.is_tensor(s):
        y = y + 1
    return self.norm(x + y)


def _list_that_is_changed(self, x):
    y, dims, last = self.linear(x), [0, 1], 0
    if y.shape[0] > 2:
        last = dims.pop()
    return self.norm(x + y).sum(dims) + last


def _variables_by_name(self, x):
    y, gate = self.linear(x), 3.0
    if y.shape[0] > 2:
        y = y * locals().get("gate", 1.0) * gate
    return self.norm(x + y)


@pytest.mark.parametrize(
    "cls",
    [
        OfSuper,
        OfAPrivateName,
        *(
            type("Other", (Layer,), {"forward": forward})
            for forward in (
                _shape_in_a_variable,
                _shape_as_an_argument,
                _name_of_an_earlier_branch,
                _dictionary_of_two_calls,
                _list_of_two_calls,
                _flag,
                _tensor_or_number,
                _list_that_is_changed,
                _variables_by_name,
            )
        ),
    ],
)
def test_what_a_branch_may_not_lose(cls):
    layer = made(cls)
    own = copy.deepcopy(layer)
    fuse(layer)
    for rows in (4, 2):
        x = drawn(rows, 3, COLUMNS)
        with torch.no_grad():
            try:
                want = own(x)
            except UnboundLocalError:
                with pytest.raises(UnboundLocalError):
                    layer(x)
            else:
                torch.testing.assert_close(layer(x), want)


def _unpacks_later(self, pair):
    if len(pair) > 2:
        pair = pair[:2]
    a, b = pair
    return self.norm(a + self.linear(b))


def _unpacks_after_a_branch(self, pair):
    count = 0
    if len(pair) > 2:
        count = pair.pop()
    a, b = pair
    return self.norm(a + self.linear(b)) + count


@pytest.mark.parametrize("forward", [_unpacks_later, _unpacks_after_a_branch])
def test_arguments_that_a_branch_changes(forward):
    layer = made(type("Other", (Layer,), {"forward": forward}))
    own = copy.deepcopy(layer)
    fuse(layer)
    a, b = drawn(2, 3, COLUMNS), drawn(2, 3, COLUMNS) + 1
    with torch.no_grad():
        for more in ([], [2.0]):
            torch.testing.assert_close(layer([a, b, *more]), own([a, b, *more]))


class OfRanks(Layer):
    def forward(self, x):
        total = x + self.linear(x)
        if x.ndim == 4:
            total = total.flatten(1, 2)
        return self.norm(total)


def test_a_rank_is_assumed_before_it_is_a_branch():
    layer, own = made(OfRanks), made(OfRanks)
    assert "add, layernorm; with norm" in str(fuse(layer))
    with torch.no_grad():
        for shape in ((2, 3, COLUMNS), (2, 1, 3, COLUMNS)):
            torch.testing.assert_close(layer(drawn(*shape)), own(drawn(*shape)))


def test_the_report_says_why_a_sum_is_left():
    def forward(self, x):
        y = x + self.linear(x)
        if y.dtype == torch.float16:
            y = torch.clamp(y, -1, 1)
        return self.norm(y)

    def between(self, x):
        y = self.linear(x)
        total, scale = x + y, 1
        if y.dtype == torch.float16:
            scale = y * 2
        return self.norm(total) * scale

    for own, why in (
        (forward, "a residual sum, which a branch reads that each call decides"),
        (between, "a branch comes between a residual sum and norm"),
    ):
        report = fuse(made(type("Other", (Layer,), {"forward": own})))
        assert [e.why for e in report.left] == [why]
