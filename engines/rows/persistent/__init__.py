"""Schedule of row programs in which CTAs stay for all rows. Its kernel is ``persistent.cu``."""

from graphfuse.engines.rows.persistent.knobs import PersistentKnobs as PersistentKnobs
from graphfuse.engines.rows.persistent.schedule import Persistent as Persistent
