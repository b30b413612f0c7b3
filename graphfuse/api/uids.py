"""The uids of a graph's tensors: which number is whose."""

from graphfuse.base.errors import GraphTypeError, GraphValidationError
from graphfuse.op_graph.tensor import Tensor


class Uids:
    """Tensors by uid. A number that only the graph gave out goes to the tensor that a user gives it to."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._claimed: set[int] = set()

    def free(self) -> int:
        """A number for a new tensor."""
        uid = len(self._tensors) + 1
        while uid in self._tensors:
            uid += 1
        return uid

    def add(self, tensor: Tensor) -> None:
        self._tensors[tensor.current_uid] = tensor

    def remove(self, tensor: Tensor) -> None:
        del self._tensors[tensor.current_uid]
        self._claimed.discard(tensor.current_uid)

    def has(self, tensor: Tensor) -> bool:
        """True if it is a tensor of this graph, and not of another that has the number, too."""
        return self._tensors.get(tensor.current_uid) is tensor

    def find(self, uid: int) -> Tensor | None:
        return self._tensors.get(uid)

    def sorted(self) -> list[int]:
        return sorted(self._tensors)

    def claim(self, tensor: Tensor, uid: int) -> None:
        """The user gives a tensor a number. GraphTypeError for what is none, GraphValidationError if it was given."""
        if isinstance(uid, bool) or not isinstance(uid, int) or uid < 0:
            raise GraphTypeError(f"tensor {tensor.get_name()!r}: uid must be an int >= 0, got {uid!r}")
        holder = self._tensors.get(uid)
        if holder is tensor:
            self._claimed.add(uid)
            return
        if holder is not None and uid in self._claimed:
            raise GraphValidationError(
                f"tensor {tensor.get_name()!r}: uid {uid} belongs to tensor {holder.get_name()!r}; uids must differ"
            )
        del self._tensors[tensor.current_uid]
        self._claimed.discard(tensor.current_uid)
        if holder is not None:
            # The number was only ours to give out: its holder moves to a free one.
            free = max(self._tensors) + 1
            holder._uid = free
            self._tensors[free] = holder
        self._tensors[uid] = tensor
        self._claimed.add(uid)
