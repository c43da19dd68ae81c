"""The faces: interfaces that programs already speak, each thin over the store."""
