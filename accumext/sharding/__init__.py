"""Parameters that `fully_shard` splits over processes, as a window has to know them."""

from accumext.sharding._window import ShardedWindow as ShardedWindow
from accumext.sharding._window import closing_groups as closing_groups
from accumext.sharding._window import window_memory as window_memory
