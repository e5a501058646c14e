"""The generated stubs of the contract in protos/stagekeeper/v1. Do not edit: `make gen`."""
