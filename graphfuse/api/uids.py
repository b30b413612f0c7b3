"""The uids of a graph's tensors."""

from graphfuse.base.errors import GraphTypeError, GraphValidationError
from graphfuse.op_graph.tensor import Tensor


class Uids:
    """Tensors by uid. If a user sets a uid that the graph chose for another tensor, the other one gets a new uid."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._claimed: set[int] = set()

    def free(self) -> int:
        """A uid for a new tensor."""
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
        """True if the tensor belongs to this graph, not to another graph that uses the same uid."""
        return self._tensors.get(tensor.current_uid) is tensor

    def find(self, uid: int) -> Tensor | None:
        return self._tensors.get(uid)

    def sorted(self) -> list[int]:
        return sorted(self._tensors)

    def claim(self, tensor: Tensor, uid: int) -> None:
        """Set a tensor's uid to the user's number. Raises GraphTypeError for a value that is no uid,
        GraphValidationError if the user gave it to another tensor."""
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
            # The graph chose the uid of its holder, which gets a free one.
            free = max(self._tensors) + 1
            holder._uid = free
            self._tensors[free] = holder
        self._tensors[uid] = tensor
        self._claimed.add(uid)
