"""Several processes: sums over them, parameters that `fully_shard` splits, and their windows."""

from accumext.distributed._agreement import Agreement as Agreement
from accumext.distributed._agreement import Alike as Alike
from accumext.distributed._agreement import agree as agree
from accumext.distributed._all_reduce import AllReduceInBuckets as AllReduceInBuckets
from accumext.distributed._all_reduce import no_sync as no_sync
from accumext.distributed._sharded_modules import gathered_once as gathered_once
from accumext.distributed._sharded_modules import is_shard as is_shard
from accumext.distributed._sharded_window import ShardedWindow as ShardedWindow
from accumext.distributed._sharded_window import window_memory as window_memory
