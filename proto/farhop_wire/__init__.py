"""The words the tiers say to each other: protobuf messages and the `Region` service. Generated beside this file."""
