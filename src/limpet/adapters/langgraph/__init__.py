"""LangGraph on Limpet: a checkpointer whose threads have one writer each, and a long-term store.

`Saver` keeps the checkpoints of graphs, `Store` the memories of agents. Both take a URL or an opened store, and both
have LangGraph's async and sync methods.
"""

from limpet.adapters.missing import missing_framework

try:
    from limpet.adapters.langgraph.ownership import ThreadLost, ThreadOwned
    from limpet.adapters.langgraph.saver import Saver
    from limpet.adapters.langgraph.store import Store
except ModuleNotFoundError as error:
    raise missing_framework("langgraph", error) from None

__all__ = ["Saver", "Store", "ThreadLost", "ThreadOwned"]
