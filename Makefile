# For fingers that type make. Everything is in ./dev, which also takes arguments.
.PHONY: demo test check bench docs
demo test check bench docs:
	@./dev $@
