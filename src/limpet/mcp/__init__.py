"""A server of the Model Context Protocol: agents share the state of a namespace by tools and resources.

``limpet mcp`` runs it. A tool call becomes the request of an operation of `limpet.server`, so that the rights of a
token are checked where those of HTTP are. What is its own: a model reads the answers. They are short, an error says
what to do next, and a change is merged with what others have written meanwhile.

- `limpet.mcp.tools` has the table of the tools.
- `limpet.mcp.values` cuts values that are too long for a model, and finds members by their paths.
- `limpet.mcp.workspace` is the namespace as one caller may use it.
- `limpet.mcp.wording` puts errors into words.
- `limpet.mcp.resources` has what can be read and subscribed to by its URI.
- `limpet.mcp.server` joins them to the SDK, and `limpet.mcp.http` serves that over HTTP.

The SDK is imported here and nowhere else: ``pip install 'limpet[mcp]'``.
"""
