"""Schedule of persistent CTAs, which process row after row. Its kernel is ``persistent.cu``."""

from graphfuse.engines.rows.persistent.knobs import PersistentKnobs as PersistentKnobs
from graphfuse.engines.rows.persistent.schedule import Persistent as Persistent
