"""The conformance suite: the contract as tests, for every engine and for engines yet to come.

    pytest -p limpet.conformance.plugin --asyncio-mode=auto --pyargs limpet.conformance --limpet-engine 'sqlite:///{tmp}/state.db'

The first paragraph of each test's docstring quotes the sentence that the test checks: a line of
docs/contract.md, or of a Behaviour list in `limpet.engine`. Every test runs on the async and on
the sync API.
"""
