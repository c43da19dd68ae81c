"""Moving entries between stores: export to a file, import, copy, and adopting the data of other programs.

Everything that moves is a `Brought` entry. `entries` reads them from a store, `lines` writes them as lines of a file
and reads them back, `sources` makes them of what other programs have stored, and `loader` writes them into a store.
"""
