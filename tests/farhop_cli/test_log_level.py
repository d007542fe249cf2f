"""`farhop log-level`: set at every balancer, and who did not do it is named. At work: tests/flows/test_contexts.py."""


async def test_an_unknown_level_and_balancers_that_cannot(world, cli):
    assert "give one of debug, info" in cli.failed(await cli.in_thread("log-level", "loud"), 2)
    output = cli.failed(await cli.in_thread("log-level", "debug"), 2)  # the pretended ones are of an older build
    assert "has no /log-level; is it an older build?" in output
