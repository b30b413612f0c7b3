"""The exceptions that graphfuse raises. Messages name the node or tensor, what was given and what is accepted."""


class GraphfuseError(Exception):
    """Base of every exception graphfuse raises on purpose."""


class GraphNotSupportedError(GraphfuseError, NotImplementedError):
    """No engine can run the graph, or none of its plans can be prepared. The message lists each candidate with its
    reason. Engines raise it if they cannot prepare a plan."""


class GraphValidationError(GraphfuseError, ValueError):
    """The graph is not well formed (shape, stride, attribute, missing property)."""


class GraphTypeError(GraphValidationError, TypeError):
    """An argument of a graph method has the wrong Python type."""


class GraphStateError(GraphfuseError, RuntimeError):
    """A step was called before the one it depends on (execute before build, for example)."""


class NotOfferedError(GraphfuseError, AttributeError):
    """A name that cuDNN's frontend has and graphfuse lacks; the message says what to use instead."""


class SerializedError(GraphfuseError, ValueError):
    """A serialized graph or plan cannot be used here: it is damaged, or of another version, device or engine."""


class VariantPackError(GraphfuseError, ValueError):
    """A value given to execute does not fit the tensor it is bound to."""


class VariantPackTypeError(VariantPackError, TypeError):
    """A value given to execute has the wrong data type or is not a buffer at all."""


class ModelError(GraphfuseError, ValueError):
    """A model cannot be fused as it is: it is compiled already, or on a device that no kernel runs on."""


class ModelTypeError(ModelError, TypeError):
    """An object was given as a model and is not one."""


class WorkspaceError(VariantPackError):
    """The workspace is missing, too small, misaligned or on another device."""


class SettingError(GraphfuseError, ValueError):
    """A device, environment variable or option of the torch.compile backend has a value that is not accepted."""


class HomeNotFoundError(GraphfuseError, OSError):
    """The user has no home directory, and no environment variable names another one."""


class DeviceError(GraphfuseError, RuntimeError):
    """The requested device does not exist, or the driver reported an error."""


class ToolkitNotFoundError(GraphfuseError, RuntimeError):
    """NVRTC or a header it needs was not found; the message lists what was tried."""


class CompilerNotFoundError(GraphfuseError, RuntimeError):
    """The emulator found no C++ compiler; the message lists what was tried."""


class GraphvizError(GraphfuseError, RuntimeError):
    """graphviz, which draws a graph as SVG, is not installed, or it failed; the message says which."""


class KernelCompileError(GraphfuseError, RuntimeError):
    """NVRTC, or the emulator's C++ compiler, rejected generated source: a bug in an engine, or a compiler that
    has no room to work in. Attributes `log` and `source` hold both in full."""


class KernelFaultError(GraphfuseError, RuntimeError):
    """A kernel on the emulator did what a GPU forbids: a bug in an engine. The message names the place."""


class RankTimeoutError(GraphfuseError, TimeoutError):
    """A call over ranks waited for others longer than GRAPHFUSE_RANKS_TIMEOUT; the message names them. The memory of
    the call is not used again."""


class MalformedError(GraphfuseError, RuntimeError):
    """An entry of the op table, a row program or a phase plan breaks a rule: a bug in graphfuse or a plug-in, not in a
    graph. The message lists every fault."""


class PluginError(GraphfuseError, RuntimeError):
    """A pattern or engine of a plug-in raised, or returned what is not accepted. The message names both.

    The attributes describe the call, if the fault was in one. distribution: package that installed the plug-in; None if
    the caller passed it. plugin: its name. stage: what it was called for. nodes: names of the nodes it was called with.
    """

    distribution: str | None = None
    plugin: str | None = None
    stage: str | None = None
    nodes: tuple[str, ...] = ()


class CheckFailedError(GraphfuseError, AssertionError):
    """``graphfuse.plugin.check`` found a mistake in a plug-in or in kernels of a graph. The message is the report, and
    `report` holds it as data."""

    report: object = None


class ReferenceEngineWarning(UserWarning):
    """A call on a device that runs kernels uses the reference engine: results are right, but slow. The message names
    the function and the reason."""
