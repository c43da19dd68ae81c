"""The server: joins tools and resources to the SDK, for any number of sessions.

A session is of one caller: the one on this machine, or the holder of a token. Clients of both generations of the
protocol are served: those that subscribe to one resource after the other, and those that listen on one stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import anyio
import mcp_types as types
import msgspec
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated
from mcp.shared.exceptions import MCPError

import limpet
from limpet.errors import InvalidValue, LimpetError, PermissionDenied
from limpet.mcp.resources import TEMPLATES, follow, parse_uri, read_resource, uri_of
from limpet.mcp.tools import INSTRUCTIONS, TOOLS, Page, Tool, read_page, schema_of
from limpet.mcp.wording import Problem, describe
from limpet.mcp.workspace import WAIT, Concealed, Unlisted, Wait, Workspace
from limpet.server.dispatch import Caller, Dispatcher, TrustedCaller
from limpet.server.outcome import redact
from limpet.server.wording import public_error
from limpet.store import Store

__all__ = ["CALLER", "make_server", "serve_stdio"]

log = logging.getLogger("limpet.mcp")

CALLER: Final = "limpet.caller"
"""Where a request over HTTP carries its caller."""
SUBSCRIPTIONS_MAX: Final = 100
"""How many resources one session subscribes to."""

Context = ServerRequestContext[Any, Any]


def make_server(
    store: Store,
    *,
    reveals: bool = True,
    read_only: bool = False,
) -> Server[Any]:
    """Make a server for a store, to be run on a transport of the SDK, or given to its client in a test.

    Args:
        store: The store. Its owner closes it. A token that opens one namespace alone works in that one instead.
        reveals: Whether callers may see values. A caller with a token needs the right for it besides.
        read_only: Whether every write is refused, and its tools are not offered.
    """
    # A copy: the dispatcher rewords the errors of its engine, and those of the store's owner stay as they are.
    session = store._session.with_engine(store._session.engine)
    dispatcher = Dispatcher(session, "mcp", read_only=read_only, namespaces=Unlisted(session))
    local = TrustedCaller("mcp")

    def space_of(context: Context) -> Workspace:
        caller: Caller = local if context.request is None else context.request.scope.get(CALLER, local)
        namespace = getattr(caller, "namespace", None) or store.name
        return Workspace(dispatcher, caller if reveals else Concealed(caller), namespace)

    offered = {name: tool for name, tool in TOOLS.items() if tool.reads or not read_only}
    described = [_describe_tool(tool) for tool in offered.values()]
    schemas = {tool.name: tool.input_schema for tool in described}

    async def list_tools(_: Context, __: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=described)

    async def call_tool(context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        return await _call(space_of(context), offered, params.name, params.arguments or {})

    async def list_resources(context: Context, params: Any) -> types.ListResourcesResult:
        after = None if params is None else params.cursor
        try:
            page = await read_page(space_of(context), Page(after=after))
        except PermissionDenied:
            # A token for some keys alone. A client that asks for all when it connects should not fail.
            return types.ListResourcesResult(resources=[])
        except LimpetError as error:
            raise _protocol_error(error) from error
        resources = [
            types.Resource(uri=uri_of(line.key), name=line.key, mime_type="application/json") for line in page.entries
        ]
        following = None if page.next is msgspec.UNSET else str(page.next)
        return types.ListResourcesResult(resources=resources, next_cursor=following)

    async def list_templates(_: Context, __: Any) -> types.ListResourceTemplatesResult:
        templates = [
            types.ResourceTemplate(uri_template=uri, name=name, description=text, mime_type="application/json")
            for uri, (name, text) in TEMPLATES.items()
        ]
        return types.ListResourceTemplatesResult(resource_templates=templates)

    async def read(context: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        text = await _or_error(read_resource(space_of(context), _resource_of(params.uri)))
        content = types.TextResourceContents(uri=params.uri, text=text, mime_type="application/json")
        return types.ReadResourceResult(contents=[content])

    subscriptions = _Subscriptions()

    async def subscribe(context: Context, params: types.SubscribeRequestParams) -> types.EmptyResult:
        await subscriptions.add(space_of(context), context, params.uri)
        return types.EmptyResult()

    async def unsubscribe(context: Context, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
        subscriptions.remove(context, params.uri)
        return types.EmptyResult()

    async def listen(context: Context, params: Any) -> types.SubscriptionsListenResult:
        return await _listen(space_of(context), context, params)

    return Server(
        "limpet",
        version=limpet.__version__,
        title="Limpet: shared state",
        instructions=INSTRUCTIONS,
        get_tool_input_schema=schemas.get,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read,
        on_subscribe_resource=subscribe,
        on_unsubscribe_resource=unsubscribe,
        on_subscriptions_listen=listen,
    )


async def serve_stdio(server: Server[Any]) -> None:
    """Serve the one client at standard input and output, until it closes them."""
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


# Tools ------------------------------------------------------------------------


def _describe_tool(tool: Tool) -> types.Tool:
    return types.Tool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=schema_of(tool.call),
        output_schema=schema_of(tool.answer),
        annotations=types.ToolAnnotations(
            read_only_hint=tool.reads, destructive_hint=tool.ends, idempotent_hint=tool.reads, open_world_hint=False
        ),
    )


async def _call(space: Workspace, offered: dict[str, Tool], name: str, given: dict[str, Any]) -> types.CallToolResult:
    """Run a tool. Whatever goes wrong is an answer: the session goes on."""
    tool = offered.get(name)
    if tool is None:
        names = ", ".join(offered)
        return _failure(Problem("no_tool", f"There is no tool {name[:100]!r} here.", f"Use one of: {names}."))
    try:
        arguments = msgspec.convert(given, tool.call)
    except msgspec.ValidationError as error:
        return _failure(Problem("invalid_value", f"{name}: {error}.", _usage(tool)))
    try:
        answer = await tool.run(space, arguments)
    except Exception as error:
        if not isinstance(error, LimpetError):
            log.error("the tool %s failed", name, exc_info=redact(error))
        return _failure(await describe(space, name, error, arguments))
    text = msgspec.json.encode(answer).decode()
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text)], structured_content=msgspec.json.decode(text)
    )


def _failure(problem: Problem) -> types.CallToolResult:
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=problem.text())],
        structured_content=msgspec.to_builtins(problem),
        is_error=True,
    )


def _usage(tool: Tool) -> str:
    schema = schema_of(tool.call)
    required = schema.get("required", [])
    names = [f"{name} (required)" if name in required else name for name in schema["properties"]]
    return f"Call it again with arguments of {tool.name}: {', '.join(names)}."


# Resources --------------------------------------------------------------------


def _resource_of(uri: str) -> Any:
    try:
        return parse_uri(uri)
    except (InvalidValue, UnicodeDecodeError) as error:
        raise MCPError(types.INVALID_PARAMS, str(error)) from error


async def _or_error(work: Any) -> Any:
    """Await work on a resource. Its error becomes one of the protocol."""
    try:
        return await work
    except LimpetError as error:
        raise _protocol_error(error) from error


def _protocol_error(error: LimpetError) -> MCPError:
    return MCPError(types.INVALID_PARAMS, str(public_error(error)), {"code": error.code})


class _Subscriptions:
    """The resources that sessions of the older protocol have subscribed to, and the tasks that follow them."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[int, str], asyncio.Task[None]] = {}

    async def add(self, space: Workspace, context: Context, uri: str) -> None:
        """Follow a resource for a session, until it unsubscribes or ends."""
        resource = _resource_of(uri)
        connection = context.session._connection
        name = (id(connection), uri)
        if name in self._tasks:
            return
        if sum(holder == id(connection) for holder, _ in self._tasks) >= SUBSCRIPTIONS_MAX:
            raise MCPError(types.INVALID_PARAMS, f"a session subscribes to at most {SUBSCRIPTIONS_MAX} resources")
        session = context.session
        started = _Started()

        async def notify() -> None:
            await session.send_resource_updated(uri)

        task = asyncio.create_task(follow(space, resource, notify, task_status=started), name="limpet-mcp-follow")
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))
        connection.exit_stack.callback(task.cancel)
        await asyncio.wait([task, started.event], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await _or_error(task)

    def remove(self, context: Context, uri: str) -> None:
        """Stop following a resource for a session."""
        if (task := self._tasks.get((id(context.session._connection), uri))) is not None:
            task.cancel()


class _Started:
    """Tells that a task has started, as task groups do."""

    def __init__(self) -> None:
        self.event: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def started(self, value: None = None) -> None:
        """Report that it has."""
        if not self.event.done():
            self.event.set_result(value)


async def _listen(space: Workspace, context: Context, params: Any) -> types.SubscriptionsListenResult:
    """Follow the resources that a client of the newer protocol names, for as long as its stream is open."""
    uris: list[str] = list(params.notifications.resource_subscriptions or [])
    if len(uris) > SUBSCRIPTIONS_MAX:
        raise MCPError(types.INVALID_PARAMS, f"a stream has at most {SUBSCRIPTIONS_MAX} resources")
    bus = InMemorySubscriptionBus()

    def publish(uri: str) -> Callable[[], Any]:
        return lambda: bus.publish(ResourceUpdated(uri))

    resources = {uri: _resource_of(uri) for uri in uris}
    for resource in resources.values():
        # Here, because an error of a task would reach the client without its message.
        await _or_error(space.admit(WAIT, Wait(pattern=resource.pattern)))
    async with anyio.create_task_group() as tasks:
        for uri, resource in resources.items():
            await tasks.start(follow, space, resource, publish(uri))
        result = await ListenHandler(bus)(context, params)
        tasks.cancel_scope.cancel()
    return result
