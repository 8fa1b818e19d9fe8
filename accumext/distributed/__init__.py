"""Parameters that `fully_shard` splits over processes: their windows, and modules gathered once."""

from accumext.distributed._sharded_modules import gathered_once as gathered_once
from accumext.distributed._sharded_modules import is_shard as is_shard
from accumext.distributed._window import ShardedWindow as ShardedWindow
from accumext.distributed._window import closing_groups as closing_groups
from accumext.distributed._window import window_memory as window_memory
