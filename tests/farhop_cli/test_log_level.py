"""`farhop log-level`: set at every balancer, and who did not do it is named. At work: tests/flows/test_contexts.py."""

import json


async def test_an_unknown_level_and_balancers_that_cannot(world, cli):
    assert "give one of debug, info" in cli.failed(await cli.in_thread("log-level", "loud"), 2)
    output = cli.failed(await cli.in_thread("log-level", "debug"), 2)  # the fakes are of an older build
    assert "has no /log-level; is it an older build?" in output


async def test_a_dry_run_lists_balancers_and_those_that_do_not_answer(world, cli):
    for name in world.file.regions:
        world.status[name, "global_admin"] = {"tier": "global", "region": name}
        world.status[name, "regional_admin"] = {"tier": "regional", "region": name}
    output = await cli.in_thread("log-level", "debug", "--region", "tokyo", "--dry-run")
    assert (output.exit_code, output.stderr) == (0, "")
    assert output.stdout == "dry run, nothing is written: global tokyo, regional tokyo: debug until the next start\n"
    world.silent.add(("tokyo", "regional_admin"))
    output = await cli.in_thread("log-level", "debug", "--region", "tokyo", "--dry-run", "--json")
    assert (output.exit_code, json.loads(output.stdout)["set"]) == (3, ["global tokyo"])
    assert "1 of 2 balancers answered: http://" in output.stderr
