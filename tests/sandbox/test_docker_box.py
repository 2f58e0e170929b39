"""What a Docker box protects: the machine, the agent's answers, and the next trajectory."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import docker
import pytest

from quintain.sandbox import SandboxDied, SandboxPool, SandboxUnavailable

pytestmark = pytest.mark.docker

FORGE = """
import os
for path in ("/proc/1/fd/1", "/proc/1/fd/0", "/proc/1/mem", "/proc/1/fd/3", "/proc/1/fd/4", "/proc/1/environ"):
    for flags in (os.O_WRONLY, os.O_RDONLY):
        try:
            fd = os.open(path, flags)
        except OSError as error:
            continue
        print("opened", path)
        if flags == os.O_WRONLY:
            os.write(fd, b"\\x00Qn1" + bytes(12))
"""
FILL_IPC = """
import ctypes, os
from multiprocessing import shared_memory
libc = ctypes.CDLL(None)
print(libc.shmget(77, 4096, 0o1666), libc.semget(77, 1, 0o1666), libc.msgget(77, 0o1666))
open("/dev/shm/note", "w").write("secret")
"""
COUNT_IPC = "cat /proc/sysvipc/shm /proc/sysvipc/sem /proc/sysvipc/msg | wc -l; ls -A /dev/shm /dev/mqueue /tmp /work"


def python(source: str) -> list[str]:
    return ["python3", "-c", source]


@pytest.fixture
def pool(make_pool) -> SandboxPool:
    return make_pool("docker")


def test_a_box_has_no_network_and_no_privileges(pool: SandboxPool, engine: docker.APIClient):
    """E11, E16"""
    with pool.lease() as box:
        host = engine.inspect_container(box.id)["HostConfig"]
        assert host["NetworkMode"] == "none" and host["LogConfig"]["Type"] == "none"
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["Privileged"] and not host["Binds"]
        assert box.exec("ls /sys/class/net").stdout == "lo\n"
        status = box.exec("cat /proc/self/status").stdout
        for line in ("CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2", "Uid:\t1000\t1000\t1000\t1000"):
            assert line in status
        assert box.exec("echo x > /etc/passwd || echo x > /usr/bin/x || echo x > /x").exit_code != 0
        assert box.exec("ls /var/run/docker.sock").exit_code != 0


def test_a_job_cannot_forge_the_agents_answers(pool: SandboxPool):
    """The agent shares the job's user, so only its not being dumpable keeps its stream and memory shut."""
    with pool.lease() as box:
        assert box.exec(python(FORGE)).stdout == ""
        assert box.exec("ls -l /proc/self/fd | grep -c pipe").stdout == "2\n"  # its own two: none of ours is inherited
        assert box.exec("ps -o args= -p 1").stdout == "quintain-agent\n"


def test_the_agent_survives_what_a_job_does_to_it(pool: SandboxPool):
    """E13: what would break a container whose main process is an ordinary one."""
    with pool.lease() as box:
        box.exec("kill -9 1; kill -INT 1; kill -STOP 1; kill -CHLD 1; kill -9 -1; rm -rf /bin/sh / 2>/dev/null")
        assert box.exec("echo ok").stdout == "ok\n"


def test_a_box_whose_agent_was_tampered_with_is_replaced(pool: SandboxPool):
    with pool.lease() as box:
        first = box.id
        assert box.exec("renice 15 1 || prlimit --pid 1 --nofile=64:64").exit_code == 0
    with pool.lease() as box:
        assert box.id != first and box.exec("ps -o ni= -p 1").stdout.strip() == "0"
    assert pool.num_replaced == 1


def test_a_fork_bomb_is_contained_and_the_box_is_usable_after_it(pool: SandboxPool):
    with pool.lease() as box:
        box.exec("b() { b | b & b; }; b", timeout_s=2)
        box.exec(python("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"), timeout_s=1)
        assert box.exec("echo ok").stdout == "ok\n"
    with pool.lease() as box:
        assert box.exec("ps -e --no-headers | wc -l").stdout.strip() == "4"  # agent, sh, ps, wc


def test_a_job_that_eats_memory_dies_and_the_agent_does_not(make_pool):
    with make_pool("docker", memory_bytes=96 * 2**20, work_bytes=16 * 2**20).lease() as box:
        assert box.exec(python("x = []\nwhile True: x.append(bytearray(2**20))"), timeout_s=20).exit_code == 137
        hogs = (
            "for i in 1 2 3 4 5 6; do python3 -c 'import time; x = bytearray(30 * 2**20); time.sleep(2)' & done; wait"
        )
        box.exec(hogs, timeout_s=20)
        assert box.exec("echo ok").stdout == "ok\n"


def test_files_are_bounded(pool: SandboxPool):
    with pool.lease() as box:
        for folder in ("/work", "/tmp", "/dev/shm"):
            assert "No space" in box.exec(f"dd if=/dev/zero of={folder}/big bs=1M count=200; rm {folder}/big").stderr
        with pytest.raises(OSError, match="No space"):
            box.write_file("big", bytes(65 * 2**20))


def test_reset_leaves_no_ipc_and_nothing_in_any_writable_folder(pool: SandboxPool):
    with pool.lease() as box:
        first = box.id
        assert "-1" not in box.exec(python(FILL_IPC)).stdout
        assert box.exec(COUNT_IPC).stdout.splitlines()[0] == "6"
    with pool.lease() as box:
        lines = box.exec(COUNT_IPC).stdout.split()
        assert box.id == first and lines == ["3", "/dev/mqueue:", "/dev/shm:", "/tmp:", "/work:"]


def test_a_box_that_dies_is_an_error_of_its_own_and_is_replaced(pool: SandboxPool, engine: docker.APIClient):
    """E13"""
    with pool.lease() as box:
        first = box.id
        engine.kill(box.id)
        with pytest.raises(SandboxDied, match=first):
            box.exec("true")
        with pytest.raises(SandboxDied, match="gone"):
            box.read_file("x")
    with pool.lease() as box:
        assert box.id != first and box.exec("echo ok").stdout == "ok\n"


def test_a_box_killed_during_a_command_is_an_error_of_its_own(pool: SandboxPool, engine: docker.APIClient):
    """E13"""
    with pool.lease() as box, ThreadPoolExecutor(1) as thread:
        running = thread.submit(box.exec, "sleep 20", timeout_s=25)
        time.sleep(0.3)
        engine.kill(box.id)
        with pytest.raises(SandboxDied, match="exec"):
            running.result(timeout=5)


def test_eight_boxes_of_one_run_start_and_work_together(make_pool, engine: docker.APIClient):
    """E09"""
    pool = make_pool("docker", pool_size=8)
    started = []
    pool.warm(8, on_started=lambda: started.append(time.monotonic()))
    boxes = [pool.acquire() for _ in range(8)]
    assert len({box.id for box in boxes}) == 8 and len(started) == 7  # the first one starts with the pool
    with ThreadPoolExecutor(8) as threads:
        outputs = list(threads.map(lambda box: box.exec("sleep 0.2; echo $0 $HOSTNAME > f; cat f").exit_code, boxes))
    assert outputs == [0] * 8
    labels = engine.inspect_container(boxes[0].id)["Config"]["Labels"]
    assert labels["quintain.run"] == "tests" and "tests" in boxes[0].id


def test_stopping_takes_no_grace_time(pool: SandboxPool, engine: docker.APIClient):
    """E08"""
    with pool.lease() as box:
        name = box.id
        box.exec("trap '' TERM; sleep 100 &")
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 2
    assert not engine.containers(all=True, filters={"name": name})


def test_a_command_takes_milliseconds(pool: SandboxPool):
    """The bound is loose, for busy machines; `docker exec` takes 50 ms on an idle one."""
    seconds = []
    for _ in range(60):
        start = time.perf_counter()
        with pool.lease() as box:
            box.exec("true")
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 0.02


def test_a_missing_image_names_the_remedy(make_pool):
    with pytest.raises(SandboxUnavailable, match=r"no such image.*docker pull no/such:image"):
        make_pool("docker", image="no/such:image")


def test_an_image_without_python_names_the_remedy(make_pool, engine: docker.APIClient, tmp_path):
    (tmp_path / "empty.tar").write_bytes(bytes(10240))
    engine.import_image(str(tmp_path / "empty.tar"), repository="quintain-test-empty", tag="1")
    try:
        with pytest.raises(SandboxUnavailable, match="has no python3"):
            make_pool("docker", image="quintain-test-empty:1")
        assert not engine.containers(all=True, filters={"ancestor": "quintain-test-empty:1"})
    finally:
        engine.remove_image("quintain-test-empty:1", force=True)
