"""The free memory: what the system has available, within the limits of control groups."""

import pytest
import torch

from accumext.tensors import free_memory as under_test
from accumext.tensors.free_memory import free_memory

CPU, GIB = torch.device("cpu"), 2**30


def files(folder, contents: dict[str, object]) -> None:
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.fixture
def system(tmp_path, monkeypatch):
    """The files of a system with 8 GiB available."""
    monkeypatch.setattr(under_test, "PROC", tmp_path / "proc")
    monkeypatch.setattr(under_test, "CGROUPS", tmp_path / "cgroup")
    meminfo = f"MemTotal: {2**25} kB\nMemAvailable:  {8 * 2**20} kB\nCached: 5 kB"
    files(tmp_path / "proc", {"meminfo": meminfo, "self/cgroup": "0::/jobs/mine"})
    return tmp_path


def test_what_is_available_without_limits(system):
    assert free_memory(CPU) == 8 * GIB
    files(system / "cgroup/jobs/mine", {"memory.max": "max", "memory.current": 5})
    assert free_memory(CPU) == 8 * GIB


@pytest.mark.parametrize("place", ["jobs/mine", "jobs", "."])
def test_limits_of_a_group_and_those_around_it(system, place):
    """Its page cache can be given back."""
    stat = f"anon 7\ninactive_file {GIB}\nactive_file 5"
    group = {"memory.max": 3 * GIB, "memory.current": 2 * GIB, "memory.stat": stat}
    files(system / "cgroup" / place, group)
    assert free_memory(CPU) == 2 * GIB


def test_limits_of_version_1(system):
    files(system / "proc", {"self/cgroup": "5:cpu:/x\n4:memory:/mine\n0::/"})
    group = {"memory.limit_in_bytes": 3 * GIB, "memory.usage_in_bytes": 4 * GIB}
    files(system / "cgroup/memory/mine", group | {"memory.stat": "total_inactive_file 5"})
    assert free_memory(CPU) == 0


def test_systems_that_do_not_say(system):
    files(system / "proc", {"meminfo": "MemTotal: 5 kB"})
    assert free_memory(CPU) is None
    (system / "proc/meminfo").unlink()
    assert free_memory(CPU) is None
    assert free_memory(torch.device("meta")) is None


@pytest.mark.parametrize("backend", ["native", "pluggable"])
def test_what_the_allocator_of_a_gpu_holds_is_free(backend, monkeypatch):
    for name, value in {
        "mem_get_info": (5, 100), "memory_reserved": 30, "memory_allocated": 20
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    assert free_memory(torch.device("cuda")) == (15 if backend == "native" else 5)


def test_this_system():
    assert free_memory(CPU) is None or free_memory(CPU) > 2**20
