"""The exceptions users meet. Each message names the node or tensor, what was given and what is accepted."""


class GraphfuseError(Exception):
    """Base of every exception graphfuse raises on purpose."""


class GraphNotSupportedError(GraphfuseError, NotImplementedError):
    """No engine can run the graph, or none of its plans can be prepared; the message lists each candidate with its
    reason. Engines raise it where one plan cannot be prepared."""


class GraphValidationError(GraphfuseError, ValueError):
    """The graph is not well formed (shape, stride, attribute, missing property)."""


class GraphTypeError(GraphValidationError, TypeError):
    """An argument of a graph method has the wrong Python type."""


class GraphStateError(GraphfuseError, RuntimeError):
    """A step was called before the one it depends on (execute before build, for example)."""


class NotOfferedError(GraphfuseError, AttributeError):
    """A name that cuDNN's frontend has and graphfuse has not; the message says what to use instead."""


class SerializedError(GraphfuseError, ValueError):
    """A serialized graph or plan cannot be used here: it is damaged, or of another version, device or engine."""


class VariantPackError(GraphfuseError, ValueError):
    """A value given to execute does not fit the tensor it is bound to."""


class VariantPackTypeError(VariantPackError, TypeError):
    """A value given to execute has the wrong data type or is not a buffer at all."""


class ModelError(GraphfuseError, ValueError):
    """A model cannot be fused as it is: it is compiled already, or on a device that no kernel runs on."""


class ModelTypeError(ModelError, TypeError):
    """An object was given as a model that is none."""


class WorkspaceError(VariantPackError):
    """The workspace is missing, too small, misaligned or on another device."""


class SettingError(GraphfuseError, ValueError):
    """A device, an environment variable, or an option of the compiler's backend is none of what is accepted."""


class HomeNotFoundError(GraphfuseError, OSError):
    """The user has no home directory, and no variable names a directory in place of one there."""


class DeviceError(GraphfuseError, RuntimeError):
    """The requested device is not there, or the driver reported an error."""


class ToolkitNotFoundError(GraphfuseError, RuntimeError):
    """NVRTC or a header it needs was not found; the message lists what was tried."""


class CompilerNotFoundError(GraphfuseError, RuntimeError):
    """The emulator found no C++ compiler; the message lists what was tried."""


class GraphvizError(GraphfuseError, RuntimeError):
    """graphviz, which draws a graph as SVG, is not installed, or it failed; the message says which."""


class KernelCompileError(GraphfuseError, RuntimeError):
    """NVRTC, or the emulator's C++ compiler, refused generated source: a bug in an engine, or a compiler that has
    no room to work in. Attributes `log` and `source` hold all of both."""


class KernelFaultError(GraphfuseError, RuntimeError):
    """A kernel did on the emulator what the machine forbids: a bug in an engine. The message names the place."""


class RankTimeoutError(GraphfuseError, TimeoutError):
    """A call over ranks waited for others longer than GRAPHFUSE_RANKS_TIMEOUT says; the message names them. Its memory
    is not used again."""


class MalformedError(GraphfuseError, RuntimeError):
    """An entry of the op table, a row program or a phase plan breaks a rule: a bug in graphfuse or a plug-in, not in a
    graph. The message names all that is wrong."""


class PluginError(GraphfuseError, RuntimeError):
    """A pattern or engine cannot be used: it raised, or gave what is not accepted. The message says which of whose.

    Where that was in a call of it: `distribution`, that it was installed with (None of one that was passed), `plugin`,
    its name, `stage`, what it was asked, and `nodes`, the names of those that it was asked about.
    """

    distribution: str | None = None
    plugin: str | None = None
    stage: str | None = None
    nodes: tuple[str, ...] = ()


class CheckFailedError(GraphfuseError, AssertionError):
    """``graphfuse.plugin.check`` found a mistake in a plug-in or in what a graph's engines make. The message is the
    report, which `report` holds as data."""

    report: object = None


class ReferenceEngineWarning(UserWarning):
    """A call on a device that runs kernels gets the reference engine: results are right, and slow. The message names
    the function and the reason."""
