"""The conformance suite: the contract as tests, for every engine and for engines yet to come."""
