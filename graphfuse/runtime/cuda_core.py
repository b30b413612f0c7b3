"""What graphfuse uses of cuda.core. Importing it from here, and nowhere else, makes one thread
do it: two that import cuda.core at once for the first time can see it half made."""

from cuda.core import ObjectCode, Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache, StridedMemoryView

__all__ = ["FileStreamProgramCache", "ObjectCode", "Program", "ProgramOptions", "StridedMemoryView"]
