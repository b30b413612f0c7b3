"""All imports from cuda.core. They are in one module so that one thread does them: if two threads import cuda.core for
the first time at once, they can see a partial module."""

from cuda.core import ObjectCode, Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache, StridedMemoryView

__all__ = ["FileStreamProgramCache", "ObjectCode", "Program", "ProgramOptions", "StridedMemoryView"]
