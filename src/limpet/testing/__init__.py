"""For tests of programs that use Limpet: fixtures, and an engine with the faults of a network.

`limpet.testing.fixtures` has fixtures for pytest. `limpet.testing.chaos` puts an engine in front of any other one that
refuses calls and loses replies. Nothing is imported here, and nothing of it is active in a program that does not ask.
"""
