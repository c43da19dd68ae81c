"""How values, errors and engine calls look on a wire, for every door and every language."""
