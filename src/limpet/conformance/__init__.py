"""The conformance suite: the contract as tests, for every engine and for engines yet to come.

    pytest -p limpet.conformance.plugin --asyncio-mode=auto --pyargs limpet.conformance --limpet-engine 'sqlite:///{tmp}/state.db'

Every test quotes the sentence it holds an engine to as the first paragraph of its docstring: a
line of docs/contract.md, or of a Behaviour list in `limpet.engine`. It runs through the
asynchronous and the blocking face alike.
"""
