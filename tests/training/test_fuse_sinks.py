"""Attention with sinks in models that are fused in place, or compiled: GPT-OSS of transformers, small. Whose calls run
the operator, and whose run the model's own attention."""

import copy
import functools
import inspect
import linecache
import pickle
import textwrap

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphfuse.torch import compile_report, fuse, unfuse
from graphfuse.torch.attention import eager_attention

pytestmark = pytest.mark.torch

transformers = pytest.importorskip("transformers", minversion="5.0")
deprecation = pytest.importorskip("transformers.utils.deprecation")

NAME = "attention_with_sinks"
TOKENS = torch.tensor([[5, 9, 33, 7, 101, 64, 3], [17, 4, 88, 2, 19, 55, 120]])


def made(layers=2, **more):
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        max_position_embeddings=128,
        sliding_window=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
        **more,
    )
    model = transformers.GptOssForCausalLM._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    return model


class Kernels(TorchDispatchMode):
    """How often torch's attention is called."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() == "aten::_scaled_dot_product_flash_attention_for_cpu"
        return func(*args, **(kwargs or {}))


def ran(call):
    """What a call returns, and how many attentions the operator ran."""
    with Kernels() as kernels:
        made = call()
    return made, kernels.count


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def gradients(model, called=None):
    (model if called is None else called)(TOKENS, labels=TOKENS).loss.backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    return found


def test_in_place_and_back():
    model = made()
    config, names = model.config.to_dict(), list(model.state_dict())
    padded = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    with torch.no_grad():
        wanted = [model(TOKENS).logits, model(TOKENS, attention_mask=padded).logits]
        report = fuse(model)
        found = {e.name: (e.kind, e.became) for e in report.entries if e.name.endswith("self_attn")}
        assert found == {f"model.layers.{i}.self_attn": ("GptOssAttention", NAME) for i in (0, 1)}
        assert str(fuse(model)) == str(report)
        for mask, want in zip((None, padded), wanted, strict=True):
            output, count = ran(lambda mask=mask: model(TOKENS, attention_mask=mask))
            assert count == 2
            close(output.logits[padded.bool()], want[padded.bool()])
        assert list(model.state_dict()) == names and model.config.to_dict() == config
        assert {f"model.layers.{i}.self_attn" for i in (0, 1)} <= {*unfuse(model)}
        output, count = ran(lambda: model(TOKENS).logits)
        assert count == 0 and torch.equal(output, wanted[0])
    assert all("forward" not in vars(m) for m in model.modules())


def test_gradients():
    model = made()
    model.train()
    wanted = gradients(model)
    fuse(model)
    found, count = ran(lambda: gradients(model))
    assert count == 2 and found.keys() == wanted.keys()
    for name, g in wanted.items():
        close(found[name], g)


def test_tokens_are_generated_as_before():
    model = made()
    wanted = model.generate(TOKENS, max_new_tokens=6, do_sample=False)
    fuse(model)
    found, count = ran(lambda: model.generate(TOKENS, max_new_tokens=6, do_sample=False))
    assert count == 2 * 6 and torch.equal(found, wanted)


def test_copies():
    model = made(1)
    fuse(model)
    with torch.no_grad():
        wanted = model(TOKENS).logits
        for other, runs in ((copy.deepcopy(model), 1), (pickle.loads(pickle.dumps(model)), 0)):
            output, count = ran(lambda other=other: other(TOKENS).logits)
            assert count == runs
            close(output, wanted)
        twin = copy.deepcopy(model)
        twin.model.layers[0].self_attn.sinks.fill_(50.0)
        assert not torch.equal(twin(TOKENS).logits, wanted) and torch.equal(model(TOKENS).logits, wanted)


def test_calls_that_run_the_models_own_attention():
    model = made(1, attention_dropout=0.5)
    fuse(model)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert ran(lambda: model(TOKENS))[1] == 0
        model.train()
        torch.manual_seed(0)
        output, count = ran(lambda: model(TOKENS).logits)
        assert count == 0
        unfuse(model)
        torch.manual_seed(0)
        assert torch.equal(output, model(TOKENS).logits)
        fuse(model.eval())
        assert ran(lambda: model(TOKENS))[1] == 1
        output, count = ran(lambda: model(TOKENS, output_attentions=True))
        assert count == 0 and output.attentions[0].shape == (2, 4, 7, 7)
        assert (output.attentions[0].sum(-1) < 1).all()


def test_what_its_file_has_later_counts(monkeypatch):
    model = made(1)
    fuse(model)
    with torch.no_grad():
        wanted = model(TOKENS).logits
        monkeypatch.setattr(
            transformers.models.gpt_oss.modeling_gpt_oss, "apply_rotary_pos_emb", lambda q, k, *_: (q, k)
        )
        found, count = ran(lambda: model(TOKENS).logits)
        unfuse(model)
        assert count == 0 and torch.equal(found, model(TOKENS).logits) and not torch.equal(found, wanted)


def test_other_implementations_are_left():
    model = made(1)
    model.config._attn_implementation = "flex_attention"
    left = [e.why for e in fuse(model).left if e.name.endswith("self_attn")]
    assert left == ["its attention is flex_attention; the operator takes the place of eager"]


def test_attention_that_is_not_the_operators_is_left(monkeypatch):
    file = transformers.models.gpt_oss.modeling_gpt_oss
    own = file.eager_attention_forward

    def doubled(module, query, key, value, attention_mask, scaling, dropout=0.0, **named):
        return 2 * own(module, query, key, value, attention_mask, scaling, dropout)[0], None

    def dropping(module, query, key, value, attention_mask, scaling, dropout=0.0, **named):
        return own(module, query, key, value, attention_mask, scaling, 0.1)

    def reading(module, query, key, value, attention_mask, scaling, dropout=0.0, **named):
        return own(module, query, key, value, attention_mask, named.get("softcap", scaling), dropout)

    def capped(module, query, key, value, attention_mask, scaling, dropout=0.0, softcap=None, **named):
        return own(module, query, key, value, attention_mask, softcap or scaling, dropout)

    more = "attention: its function reads more arguments than a scale and dropout"
    whys = {
        doubled: "attention: it computes more than attention with sinks",
        reading: more,
        capped: more,
        dropping: "attention: dropout follows its probabilities",
    }
    model = made(1)
    for function, why in whys.items():
        monkeypatch.setattr(file, "eager_attention_forward", function)
        if function is dropping:  # also in inference
            monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, p, training: torch.dropout(x, p, True))
        assert [e.why for e in fuse(model).left if e.name.endswith("self_attn")] == [why]


def test_forwards_in_wrappers(monkeypatch):
    """One that gives an argument by another name is gone around where a call does not have that; others are left."""
    cls = transformers.models.gpt_oss.modeling_gpt_oss.GptOssAttention
    renamed = deprecation.deprecate_kwarg("mask", "99.0", new_name="attention_mask")
    monkeypatch.setattr(cls, "forward", renamed(cls.forward))
    model = made(1)
    fuse(model)
    attention, x = model.model.layers[0].self_attn, torch.randn(2, 3, 32)
    angles = torch.ones(2, 3, 8), torch.zeros(2, 3, 8)
    with torch.no_grad():
        assert ran(lambda: model(TOKENS))[1] == 1
        (wanted, _), count = ran(lambda: attention(x, angles, attention_mask=None))
        assert count == 1
        with pytest.warns(FutureWarning, match="`mask` is deprecated"):
            (found, _), count = ran(lambda: attention(x, angles, mask=None))
        assert count == 0
        close(found, wanted)

    def passed_on(*given, _own=cls.forward, **named):
        return _own(*given, **named)

    monkeypatch.setattr(cls, "forward", functools.wraps(cls.forward)(passed_on))
    left = [e.why for e in fuse(made(1)).left if e.name.endswith("self_attn")]
    assert left == [f"attention: its forward is wrapped by {__name__}.passed_on"]


def test_what_it_reads_of_the_module_is_compared():
    model = made(1)
    fuse(model)
    with torch.no_grad():
        assert ran(lambda: model(TOKENS))[1] == 1
        model.model.layers[0].self_attn.num_key_value_groups = 4
        with pytest.raises(RuntimeError, match="must match the size"):  # of the model's own attention
            model(TOKENS)


@pytest.mark.parametrize(
    ("model", "name", "is_found"),
    [
        ("flint", "Flint", True),
        ("hy_v4", "HYV4", True),
        ("deepseek_v4", "DeepseekV4", True),
        ("granite_swa", "GraniteSWA", False),
        ("llama", "Llama", False),
    ],
)
def test_other_models(model, name, is_found):
    """By what their attention computes: Granite's has sinks, too, and computes them in another way."""
    file = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    with torch.device("meta"):
        module = getattr(file, f"{name}Attention")(getattr(transformers, f"{name}Config")(), 0)
    found = eager_attention.recognized(module)
    assert callable(found) if is_found else found is None


def keeping(graphs):
    """A backend that keeps what graphs call."""

    def kept(graph, inputs):
        graphs.append([str(n.target) for n in graph.graph.nodes])
        return graph

    return kept


def compiled(model, then="aot_eager"):
    return torch.compile(model, backend="graphfuse", options={"then": then})


def became():
    entries = (e for graph in compile_report().graphs for e in graph.entries if e.name.endswith("self_attn"))
    return [e.became for e in entries if e.became != "region"]


@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_prefill_and_decoding():
    model, graphs = made(1), []
    torch._dynamo.register_backend(keeping(graphs), name="kept")
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for tokens in (TOKENS, TOKENS[:, :1]):
            calls = (model, compiled(model, "kept"))
            one, other = (f(tokens, past_key_values=c).logits for f, c in zip(calls, caches, strict=True))
            close(other, one)
    assert became() == [NAME] * 2 and len(graphs) == 2
    for names in graphs:
        assert sum(NAME in n for n in names) == 1
        assert not any("softmax" in n for n in names) and "max" not in names
        assert any("graphfuse.region" in n or n == "region" for n in names)  # the choice of experts


@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_training():
    model = made(1)
    model.train()
    wanted, found = gradients(model), gradients(model, compiled(model))
    assert became() == [NAME]
    for name, g in wanted.items():
        close(found[name], g)


@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_attention_whose_probabilities_are_read_is_left():
    model = made(1)
    with torch.no_grad():
        one, other = (f(TOKENS, output_attentions=True) for f in (model, compiled(model, "eager")))
    close(other.attentions[0], one.attentions[0])
    assert became() == [""]


@pytest.mark.usefixtures("nothing_compiled")
def test_a_fused_model_compiles():
    model = made(1)
    fuse(model)
    graphs = []
    with torch.no_grad():
        wanted = model(TOKENS).logits
        again = torch.compile(model, backend=keeping(graphs), fullgraph=True)
        for _ in range(2):
            close(again(TOKENS).logits, wanted)
    assert len(graphs) == 1 and sum(NAME in n for n in graphs[0]) == 1


def attention_that(change):
    """eager_attention_forward as GPT-OSS has it, with a change of its text."""
    from transformers.models.gpt_oss import modeling_gpt_oss as theirs

    text = textwrap.dedent(inspect.getsource(theirs.eager_attention_forward))
    old, new = change
    assert old in text
    names = dict(vars(theirs))
    name = f"changed {len(linecache.cache)}"
    linecache.cache[name] = (len(text), None, (text := text.replace(old, new)).splitlines(True), name)
    exec(compile(text, name, "exec"), names)
    return names["eager_attention_forward"]


CHANGES = {
    "in training": ("scores = probs[..., :-1]", "scores = probs[..., :-1] * (0.5 if module.training else 1.0)"),
    "dropout of its own": ("p=dropout", "p=0.3"),
    "by shape": ("scores = probs[..., :-1]", "scores = probs[..., :-1] * (0.5 if query.shape[2] > 3 else 1.0)"),
    "by the configuration": ("* scaling", "* scaling * (1.0 if module.config.hidden_size else 0.5)"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_function_that_depends_on_more_is_left(change, monkeypatch):
    from transformers.models.gpt_oss import modeling_gpt_oss as theirs

    monkeypatch.setattr(theirs, eager_attention.EAGER, attention_that(change))
    model = made(layers=1)
    (entry,) = [e for e in fuse(model).entries if e.name.endswith("self_attn")]
    assert not entry.is_replaced and entry.why


def test_what_the_function_reads_of_its_file_may_be_changed_later(monkeypatch):
    from transformers.models.gpt_oss import modeling_gpt_oss as theirs

    model = made(layers=1)
    fuse(model)
    monkeypatch.setattr(theirs, "repeat_kv", lambda t, times: 2 * t.repeat_interleave(times, 1))
    with torch.no_grad():
        found, count = ran(lambda: model(TOKENS).logits)
        assert count == 0
        unfuse(model)
        close(found, model(TOKENS).logits)
