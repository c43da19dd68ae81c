# For fingers that type make. Everything is in ./dev, which also takes arguments.
.PHONY: demo test check fix bench docs
demo test check fix bench docs:
	@./dev $@
