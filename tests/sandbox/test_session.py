"""Commands are stateless; in a session `cd` and `export` persist."""

from __future__ import annotations

import asyncio

from quintain.sandbox import BlockingSandbox
from quintain.sandbox.background import background_loop
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.local import LocalSandbox
from quintain.sandbox.session import Session

ODD = "a 'b' \"c\" $(d) `e` \\ \n f"


def test_commands_share_nothing_but_files(box: BlockingSandbox):
    box.exec("mkdir sub; cd sub; export COLOUR=blue")
    assert box.exec('basename "$PWD"; echo "[$COLOUR]"').stdout.splitlines()[1] == "[]"


def test_in_a_session_cd_and_export_persist(box: BlockingSandbox):
    session = box.session(env={"SHAPE": "round one"})
    assert session.exec("mkdir -p 'a b/c' && cd 'a b/c' && export COLOUR=blue HOW=\"$SHAPE\"").exit_code == 0
    assert session.exec('echo "$COLOUR $HOW"; pwd').stdout.splitlines()[0] == "blue round one"
    assert session.exec("pwd").stdout.endswith("/a b/c\n")
    assert session.exec("cd .. && exit 7").exit_code == 7
    assert session.exec("pwd").stdout.endswith("/a b\n")
    assert not box.session().exec("pwd").stdout.endswith("/a b\n")


def test_values_of_any_shape_persist(box: BlockingSandbox):
    session = box.session(env={"ODD": ODD})
    session.exec('export TWICE="$ODD"; mkdir -- "-x\'y"; cd -- "-x\'y"')
    result = session.exec('printf %s "$TWICE"; pwd >&2')
    assert result.stdout == ODD and result.stderr.endswith("/-x'y\n")


def test_a_session_starts_where_it_is_told(box: BlockingSandbox):
    assert box.session(cwd="/usr/bin").exec("pwd").stdout == "/usr/bin\n"
    assert box.session().exec("cat", stdin=b"input").stdout == "input"


def test_what_is_killed_leaves_the_session_as_it_was(box: BlockingSandbox):
    session = box.session()
    session.exec("mkdir one two; cd one; export COLOUR=blue")
    assert session.exec("cd ../two; export COLOUR=red; sleep 30", timeout_s=0.3).timed_out
    assert session.exec("cd ../two; kill -9 $$").exit_code == 137
    result = session.exec('basename "$PWD"; echo "$COLOUR"')
    assert result.stdout == "one\nblue\n"


def test_sessions_of_the_async_box():
    async def scenario() -> str:
        box = LocalSandbox(SandboxConfig(type="local"), acknowledged=True)
        await box.start()
        try:
            session = Session(box)
            await session.exec("export COLOUR=green; cd /")
            return (await session.exec('echo "$COLOUR $PWD"')).stdout
        finally:
            await asyncio.shield(box.stop())

    assert background_loop().run(scenario()) == "green /\n"
