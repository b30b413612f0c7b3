"""``check``: runs all stages on a subject and returns the report."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from graphfuse.base.device import ARCHES, CPU, EMULATOR, Device, for_arch
from graphfuse.base.errors import DeviceError, KernelCompileError, PluginError, ToolkitNotFoundError
from graphfuse.base.wording import counted
from graphfuse.contract.engine import Engine
from graphfuse.emulator.compiler import Build
from graphfuse.runtime.record import gpu_needed
from graphfuse.testing import calls, gradients, kernels, timing
from graphfuse.testing.acceptance import AcceptedCase, accepted_cases
from graphfuse.testing.machine_code import resources
from graphfuse.testing.report import Finding, Line, Report
from graphfuse.testing.subject import Subject, subject_of
from graphfuse.testing.variants import ASPECTS, COMPUTE, LAYOUT, ROUNDING, SCALARS, CheckCase, cases

TOLERANCE = 2e-5
_Named = TypeVar("_Named", AcceptedCase, gradients.GradientProblem)
_ENOUGH = 3  # mistakes after which a stage stops: more are usually the same
_SMALL = 1 << 10  # most elements under ThreadSanitizer, which takes a millisecond per thread


def check(
    what: object,
    *,
    graphs: Sequence[object] = (),
    problems: int = 48,
    programs: int = 6,
    random: int = 12,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    architectures: Sequence[str] = ARCHES,
    benchmark: bool = False,
    raises: bool = True,
) -> Report:
    """Check engines against the reference and under sanitizers, on problems made of graphs.

    what: a ``pygraph``, to check all installed engines on it; a ``Pattern``, an ``Engine`` or a tuple of them; or the
    name of an installed one. graphs: graphs to make problems of, instead of graphs built from the patterns' templates.
    Problems differ from them in sizes, strides, types, rounding, compute types and scalar operands. An engine may
    decline problems; that is counted, and is not a fault.

    problems: how many accepted problems are run. programs: how many different kernels are compiled; problems with
    equal kernels share one. random: for each graph, the number of problems that differ in several ways. seed: of their
    random choices. tolerance: the largest error of a float32 result, relative to it and to the mean magnitude.
    architectures: chips to compile for; may be empty. benchmark: time kernels and compare them with the stream limit,
    on a GPU. raises: whether to raise CheckFailedError, which has the report, if something is wrong.

    Returns the report. Raises CompilerNotFoundError if kernels cannot run because there is no C++ compiler, DeviceError
    for a benchmark without a GPU, and SettingError for an unknown architecture.
    """
    import torch

    chips = [for_arch(arch) for arch in architectures]
    if benchmark and (reason := gpu_needed("check(benchmark=True)")):
        raise DeviceError(reason)
    subject = subject_of(what, graphs)
    run = _Run()
    every = [case for sample in subject.samples for case in cases(sample, random, seed)]
    found = run.planned(subject, every, _devices())
    ordered = _spread(found)
    on_emulator = [one for one in ordered if kernels.emulated(one)]
    light = [one for one in on_emulator if kernels.light(one)]
    by_source, rest = _by_source(light, programs, problems)
    called = [one for one in ordered if not kernels.emulated(one)][:problems]
    chosen = [one for group in by_source.values() for one in group]
    run.covered(subject, chosen + called, every)
    heavy = counted(len(on_emulator) - len(light), "problem")
    bad = run.stage(
        "values, AddressSanitizer",
        chosen,
        lambda one: kernels.fault(torch, one, Build.ADDRESS, tolerance, seed),
        f"{counted(rest, 'further kernel')} left out: programs={programs}" if rest else "",
        f"{heavy} of more than {kernels.MOST_THREADS} threads left out" if len(light) < len(on_emulator) else "",
    )
    small = [min(group, key=lambda one: abs(one.elements - _SMALL // 8)) for group in by_source.values()]
    racing = [one for one in small if one.elements <= _SMALL and not bad]
    large = counted(len(small) - len(racing), "kernel")
    left = "left out until values are right" if bad else f"{large} left out: too large"
    run.stage(
        "races, ThreadSanitizer",
        racing,
        lambda one: kernels.fault(torch, one, Build.RACE, tolerance, seed),
        left if len(small) > len(racing) else "",
    )
    aliased = [one for one in small if not bad and one.engine.in_place(one.part.facts, one.part.knobs)]
    if aliased:
        run.stage(
            "in place", aliased, lambda one: kernels.fault(torch, one, Build.ADDRESS, tolerance, seed, in_place=True)
        )
    if called:
        run.stage("values, as execute runs it", called, lambda one: calls.fault(torch, subject, one, tolerance, seed))
    run.differentiated(torch, subject, programs, problems, tolerance, seed)
    if chips:
        run.compiled(subject, chips, [group[0].case for group in by_source.values()] or every, programs)
    if benchmark:
        run.timed(torch, subject)
    report = run.report(subject)
    if raises:
        report.raise_for_findings()
    return report


def _devices() -> list[Device]:
    from graphfuse.runtime import device

    here = device.get()
    return [EMULATOR, CPU] if here.kind != "cuda" else [EMULATOR, CPU, here]


class _Run:
    """State of one check."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.findings: list[Finding] = []
        self.declined: Counter[str] = Counter()

    def report(self, subject: Subject) -> Report:
        return Report(subject.name, tuple(self.lines), tuple(self.findings), dict(self.declined))

    def stage(
        self, name: str, problems: Sequence[_Named], fault: Callable[[_Named], str | None], *notes: str
    ) -> list[_Named]:
        """Checks each problem until enough are wrong, and returns the wrong ones. notes: on omitted problems."""
        wrong: list[_Named] = []
        done = 0
        for one in problems:
            done += 1
            what = fault(one)
            if what:
                wrong.append(one)
                self.findings.append(Finding(name, one.name, what))
            if len(wrong) == _ENOUGH:
                break
        stopped = f"stopped after {_ENOUGH} mistakes" if done < len(problems) else ""
        self.lines.append(Line(name, done - len(wrong), len(wrong), "; ".join(filter(None, (stopped, *notes)))))
        return wrong

    def planned(
        self, subject: Subject, every: Sequence[CheckCase], devices: Sequence[Device], name: str = "planning"
    ) -> list[AcceptedCase]:
        found: list[AcceptedCase] = []
        wrong = 0
        for case in every:
            for device in devices:
                try:
                    found += accepted_cases(subject, case, device, self.declined if name == "planning" else Counter())
                except PluginError as error:
                    wrong += 1
                    self.findings.append(Finding(name, f"{case.name} for {device}", str(error)))
                if wrong == _ENOUGH:
                    break
        note = f"{counted(len(every), 'problem')}, of which {len({one.case for one in found})} were taken"
        self.lines.append(Line(name, len(every) - wrong, wrong, note))
        return found

    def covered(self, subject: Subject, chosen: Sequence[AcceptedCase], every: Sequence[CheckCase]) -> None:
        """Reports declared aspects that no problem covers: a missing check does not show that an engine is right."""
        seen = {aspect for one in chosen for aspect in one.case.aspects}
        for engine in subject.engines:
            missed = [a for a in _declared(engine) if a not in seen and any(a in c.aspects for c in every)]
            if missed and chosen:
                note = f"{engine.name} declares in `serves` what no problem that is run has: {', '.join(missed)}"
                self.lines.append(Line("coverage", 0, 0, note))
        if not chosen and not self.findings:
            what = "no problem was accepted on the emulator or the CPU; give graphs that are: check(graphs=[...])"
            if not every:
                what = "no graph can be built from the templates; give some: check(graphs=[...])"
            reasons = "".join(f"\n{reason}" for reason, _ in self.declined.most_common(5))
            self.findings.append(Finding("coverage", subject.name, what + reasons))

    def differentiated(self, torch, subject: Subject, programs: int, most: int, tolerance: float, seed: int) -> None:
        """Checks gradients of the graphs by finite differences, and kernels of their backward graphs against the
        reference."""
        found, refused = gradients.problems(subject.samples[:most])
        if refused:
            graphs = counted(len(refused), "graph has", "graphs have")
            self.lines.append(Line("gradients", 0, 0, f"{graphs} none: {refused[0]}"))
        if not found or self.stage("gradients, in float64", found, lambda one: gradients.fault(torch, one, seed)):
            return
        backward = [next(cases(one.backward, 0, seed)) for one in found]
        parts = self.planned(subject, backward, [EMULATOR], "gradients, planning")
        light = [one for one in parts if kernels.emulated(one) and kernels.light(one)]
        by_source, _ = _by_source(light, programs, most)
        chosen = [one for group in by_source.values() for one in group]
        if chosen:
            fault = functools.partial(kernels.fault, torch, sanitizers=Build.ADDRESS, tolerance=tolerance, seed=seed)
            self.stage("gradients, kernels", chosen, fault)

    def compiled(self, subject: Subject, chips: Sequence[Device], some: Sequence[CheckCase], programs: int) -> None:
        """Checks that kernels compile for each chip and use no local memory: everything must fit registers."""
        from graphfuse.runtime import nvrtc, toolkit

        name = "machine code, no spills"
        try:
            toolkit.load()
        except ToolkitNotFoundError as error:
            self.lines.append(Line(name, 0, 0, f"left out: {str(error).splitlines()[0]}"))
            return
        good, bad, most = 0, 0, 0
        for chip in chips:
            sources: dict[str, AcceptedCase] = {}
            for case in some:
                try:
                    for one in accepted_cases(subject, case, chip, Counter()):
                        texts = one.engine.sources(one.part.facts, one.part.knobs)
                        sources |= {text: one for text in texts if text not in sources}
                except PluginError as error:
                    bad += 1
                    self.findings.append(Finding(name, f"{case.name} for {chip.arch}", str(error)))
                    break
                if len(sources) >= programs:
                    break
            for text, one in sources.items():
                try:
                    used = resources(nvrtc.compile(text, chip.arch, f"{one.engine.name}.cu"))
                except KernelCompileError as error:
                    what: str | None = str(error)
                else:
                    most = max(most, used.registers)
                    what = f"{used.local} bytes of local memory a thread, at {used.registers} registers; accepted: none"
                    what = what if used.local else None
                if what:
                    bad += 1
                    self.findings.append(Finding(name, f"{one.name} for {chip.arch}", what))
                else:
                    good += 1
        archs = ", ".join(chip.arch for chip in chips)
        self.lines.append(Line(name, good, bad, f"{archs}; at most {most} registers"))

    def timed(self, torch, subject: Subject) -> None:
        self.lines += [Line("benchmark", 1, 0, row) for row in timing.timed(torch, subject)]


def _declared(engine: Engine) -> list[str]:
    """Members of ASPECTS that an engine declares support for."""
    declared = {
        ROUNDING: engine.serves.rounding,
        LAYOUT: engine.serves.layouts,
        COMPUTE: len(engine.serves.compute) > 1,
        SCALARS: engine.serves.by_value,
    }
    return [aspect for aspect, is_declared in declared.items() if is_declared]


def _spread(found: Sequence[AcceptedCase]) -> list[AcceptedCase]:
    """Accepted problems, with aspects, graphs and devices in turn."""
    groups: dict[object, list[AcceptedCase]] = {}
    for one in found:
        key = (*((a in one.case.aspects) for a in ASPECTS), one.case.name.split(":")[0], one.device.kind)
        groups.setdefault(key, []).append(one)
    rounds = itertools.zip_longest(*groups.values())
    return [one for several in rounds for one in several if one is not None]


def _by_source(
    found: Sequence[AcceptedCase], programs: int, problems: int
) -> tuple[dict[str, list[AcceptedCase]], int]:
    """Problems by kernel, for the first `programs` kernels, and how many kernels were omitted. Kernels that are the
    first to cover a declared aspect of their engine come first, because `programs` may be small."""
    groups: dict[str, list[AcceptedCase]] = {}
    for one in found:
        groups.setdefault(kernels.source(one), []).append(one)
    early: list[str] = []
    shown: set[tuple[str, str]] = set()
    for text, group in groups.items():
        new = {(one.engine.name, a) for one in group for a in _declared(one.engine) if a in one.case.aspects} - shown
        if new or not early:
            early.append(text)
            shown |= new
    chosen = {text: groups[text] for text in list(dict.fromkeys([*early, *groups]))[:programs]}
    in_turn = (one for several in itertools.zip_longest(*chosen.values()) for one in several if one is not None)
    kept = set(map(id, itertools.islice(in_turn, problems)))
    return {text: [o for o in group if id(o) in kept] for text, group in chosen.items()}, len(groups) - len(chosen)
