"""What graphfuse uses of cuda.core. All imports of it are here, so that one thread does them: two threads that import
cuda.core for the first time at once can see a partial module."""

from cuda.core import ObjectCode, Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache, StridedMemoryView

__all__ = ["FileStreamProgramCache", "ObjectCode", "Program", "ProgramOptions", "StridedMemoryView"]
