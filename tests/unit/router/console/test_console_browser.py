"""The console in a real headless Chromium, against a router with stand-in workers.

Skipped, with the reason, where there is no browser: `make chromium` gets one.
"""

import asyncio
import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from playwright.async_api import Page
from support.adapters.catalog_databases import add
from support.observability.browser import OTHER_NAME, Seen, browsing, focused, shows, until
from support.router_stand_ins import REVISION_ID, WORDS, ClusterStandIn, stops_after
from support.routers.keyed_cluster import keyed_cluster
from support.routers.management_calls import ask, id_of, imported, lora, managing, upload

from adapters.scopes import Scope
from process.free_ports import bound_socket
from router.api import status_pages
from router.api.training import TrainerAddress
from router.console.page import ASSETS

pytestmark = pytest.mark.slow  # a browser starts

SECRET = "the secret of router and trainer"
HOSTILE = "<img src=/x onerror=window.hit=1><script>window.hit=1</script>"


async def open_view(page: Page, view: str) -> None:
    await page.click(f"#tab-{view}")


async def choose(page: Page, adapter: str) -> None:
    await page.click(f"[data-key={json.dumps(adapter)}] button")


async def send(page: Page, prompt: str, left: str, right: str) -> None:
    """An adapter is named as one that is in no list; the empty name is the base model."""
    await fill(page, "prompt", prompt)
    for side, name in (("left", left), ("right", right)):
        await fill(page, f"{side}-adapter", " other" if name else "")
        await fill(page, f"{side}-other", name)
    await page.click("#send")


async def fill(page: Page, element: str, value: str) -> None:
    """As a user does who chooses or types."""
    await page.evaluate(
        f"(() => {{ const field = document.getElementById('{element}'); field.value = {json.dumps(value)};"
        "for (const name of ['input', 'change']) field.dispatchEvent(new Event(name)) })()"
    )


async def enter(page: Page, key: str) -> None:
    """Into the field for keys, which has the focus."""
    await page.keyboard.insert_text(key)
    await page.keyboard.press("Enter")


async def tab_through(page: Page, *names: str, shift: bool = False) -> None:
    for name in names:
        await page.keyboard.press("Shift+Tab" if shift else "Tab")
        assert await focused(page) == name


async def around_calls(page: Page, begin: str, call: str) -> None:
    """Run JavaScript once, and from now on in place of each call of the page. There `ask` is the browser's fetch."""
    await page.evaluate(
        f"(() => {{ const ask = window.fetch; {begin}; window.fetch = async (url, ...rest) => {{ {call} }} }})()"
    )


def behave(cluster: ClusterStandIn, **values: Any) -> None:
    """Set attributes of all decode engines."""
    for worker in cluster.decode:
        for name, value in values.items():
            setattr(worker.engine, name, value if not isinstance(value, list) else [*value])


def check_origin(seen: Seen, *allowed: str) -> None:
    """Nothing was asked of anybody but the router, and nothing failed."""
    assert seen.errors == []
    assert [url for url in seen.urls if not url.startswith(allowed)] == []


async def test_views_updates_and_a_rollback(tmp_path: Path) -> None:
    async with managing(1, 2) as cluster, browsing() as page:
        seen = Seen(page)
        for name in ("a0", "everywhere"):
            await imported(cluster, name)
        for seed in (1, 2):
            await upload(cluster, lora(tmp_path, seed), name="acme/poet")
        await page.goto(f"{cluster.admin_url}/console")
        assert await page.text_content("h1") == "Prelude base"
        await check_fleet(cluster, page)
        await check_requests(cluster, page)
        await check_adapters(cluster, page, tmp_path)
        await check_try(cluster, page)
        check_origin(seen, f"{cluster.admin_url}/console")
        assert {url.rpartition("/")[2] for url in seen.urls} >= set(ASSETS) - {"icon.svg"}


async def check_fleet(cluster: ClusterStandIn, page: Page) -> None:
    await shows(page, "#connection", "Live")
    await shows(page, "#worker-rows [data-key=p0]", "prefill")
    await shows(page, "#worker-rows [data-key=p0]", "0 tokens, 0 ms5,000 tokens/s, assumed")
    await shows(page, "#pair-rows", "p0warmwarm")
    await shows(page, "#workers-now", "3 of 3")
    await cluster.decode[1].change(ready=False, reason="its engine restarts")  # seen without a reload
    await shows(page, "#worker-rows [data-key=d1]", "not ready: its engine restarts")
    await shows(page, "#pair-rows", "p0warmd1: not ready")
    await shows(page, "#workers-now", "2 of 3")
    await cluster.decode[1].change(ready=True, reason="")
    await shows(page, "#workers-now", "3 of 3")
    del cluster.prefill[0].state.warm_pairs[:]
    await cluster.prefill[0].change()
    await shows(page, "#pair-rows", "p0not warm yetnot warm yet")
    await cluster.warm()
    await shows(page, "#pair-rows", "p0warmwarm")


async def check_requests(cluster: ClusterStandIn, page: Page) -> None:
    await open_view(page, "requests")
    await shows(page, "#requests-note", "No request is in flight")
    behave(cluster, behaviours=[stops_after(2)])
    asking = asyncio.create_task(cluster.stream(prompt="secret", adapter="a0"))
    await shows(page, "#request-rows", f"completions, streameda0{REVISION_ID[7:19]}")
    await shows(page, "#request-rows", "streams (p0 → d")
    await shows(page, "#flight-now", "1")
    assert "secret" not in await page.evaluate("document.documentElement.outerHTML")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await shows(page, "#requests-note", "No request is in flight")
    behave(cluster, behaviours=[], words=(" word",) * 1000, event_gap_s=0.05)
    asking = asyncio.create_task(cluster.stream(prompt="secret"))
    await until(  # while it streams
        page,
        "document.querySelector('#flight-now').textContent === '1'"
        " && Number(document.querySelector('#tokens-now').textContent) > 0",
    )
    await shows(page, "#first-now", "s, p95 ")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    behave(cluster, words=WORDS, event_gap_s=0.0)
    await shows(page, "#requests-note", "No request is in flight")
    await shows(page, "#tokens-now", "0")
    assert await page.evaluate("document.querySelectorAll('.chart path.line[d^=M]').length") == 3


async def check_adapters(cluster: ClusterStandIn, page: Page, folder: Path) -> None:
    await open_view(page, "adapters")
    old, new = (id_of(folder, seed)[7:19] for seed in (1, 2))
    await shows(page, "#adapter-rows [data-key='acme/poet']", f"r2{new}loraprefill")
    await choose(page, "acme/poet")
    await shows(page, "#adapter-aliases", "@latest is r2")
    await cluster.prefill[0].make_resident(id_of(folder, 2))
    await cluster.prefill[0].send_delta(on_disk=[id_of(folder, 1)])
    await shows(page, "#revision-rows", f"r2{new}@latestp0–")
    await shows(page, "#revision-rows", f"r1{old}––p0")
    assert (await ask(cluster, "POST", "/v1/adapters/acme/poet/rollback"))[0] == 200
    await shows(page, "#adapter-rows [data-key='acme/poet']", f"r1{old}")
    await shows(page, "#adapter-aliases", "@latest is r1")
    await shows(page, "#revision-rows", f"r1{old}@latest–p0")
    await fill(page, "prefix", "ev")
    await until(page, "document.querySelector('#adapter-rows').textContent.startsWith('everywhere')")
    await fill(page, "prefix", "")


async def check_try(cluster: ClusterStandIn, page: Page) -> None:
    await open_view(page, "try")
    await send(page, "Hi", "acme/poet", "")
    await shows(page, "#try-note", "Both are done")
    assert [await page.text_content(f"#{side}-answer") for side in ("left", "right")] == ["Hello wide world"] * 2
    await until(
        page,
        "document.querySelector('#left-facts').textContent.match(/^revision [0-9a-f]{12}, TTFT [\\d.]+ m?s, 3 tokens/)",
    )
    assert (await page.text_content("#right-facts")).startswith("base model, TTFT ")
    (left, right) = (body for worker in cluster.decode for body in worker.engine.requests if "messages" in body)
    assert left["messages"] == right["messages"] == [{"role": "user", "content": "Hi"}]
    # A stream is shown while it lasts, and can be stopped.
    behave(cluster, behaviours=[stops_after(3)] * 2)
    await send(page, "Hi", "a0", "acme/poet")
    await shows(page, "#left-answer", "Hello wide")
    await shows(page, "#right-answer", "Hello wide")
    await page.click("#stop")
    await shows(page, "#try-note", "Stopped")
    # What a model thinks is shown, apart from its answer.
    behave(cluster, behaviours=[], thoughts=("Who is", " that?"))
    await send(page, "Hi", "a0", "")
    await shows(page, "#try-note", "Both are done")
    assert [await page.text_content(f"#{side}-answer .thought") for side in ("left", "right")] == ["Who is that?"] * 2
    assert [await page.text_content(f"#{side}-answer") for side in ("left", "right")] == [
        "Who is that?Hello wide world"
    ] * 2
    behave(cluster, thoughts=())


async def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    def is_text(selector: str) -> str:
        return f"document.querySelector('{selector}').textContent.includes({json.dumps(HOSTILE)})"

    async with managing(1, 1, folder=tmp_path / "cluster") as cluster, browsing() as page:
        seen = Seen(page)
        await imported(cluster, "a0")
        await upload(cluster, lora(tmp_path, 1), name="evil")
        with sqlite3.connect(tmp_path / "cluster" / "catalog.db") as catalog:  # no importer would take it
            catalog.execute("UPDATE adapters SET name = ? WHERE name = 'evil'", (HOSTILE,))
        catalog.close()
        await page.goto(f"{cluster.admin_url}/console#/adapters")
        await until(page, is_text("#adapter-rows"))
        await until(page, is_text("#adapter-rows th button"))
        await page.click("#adapter-rows button")
        await until(page, is_text("#adapter-note"))  # of the error, which names it
        seen.errors.clear()  # the browser logs the refused call
        await page.click("[data-key=a0] button")
        await until(page, "document.querySelector('#adapter-name').textContent === 'a0'")
        await cluster.decode[0].change(ready=False, reason=HOSTILE)
        await until(page, is_text("#worker-rows"))
        await cluster.decode[0].change(ready=True, reason="")
        await shows(page, "#workers-now", "2 of 2")
        cluster.decode[0].engine.words = ("Once ", HOSTILE)
        cluster.decode[0].engine.thoughts = (HOSTILE,)
        await open_view(page, "try")
        await send(page, HOSTILE, "a0", HOSTILE)
        await shows(page, "#try-note", "with an error")
        await until(page, is_text("#left-adapter"))
        await until(page, is_text("#left-answer .thought"))
        await until(page, is_text("#left-answer"))
        await until(page, is_text("#right-answer"))
        assert await page.evaluate("window.hit") is None
        assert await page.evaluate("document.querySelectorAll('img, script:not([src])').length") == 0
        assert not any(url.endswith("/x") for url in seen.urls)

        # And the policy would hold if the page's own code were wrong.
        for attempt in ("document.body.innerHTML = '<b>'", "document.body.append(Object.assign("
                        "document.createElement('script'), {text: 'window.hit = 1'}))"):  # fmt: skip
            assert await page.evaluate(
                f"(() => {{ try {{ {attempt}; return false }} catch (e) {{ return e.name }} }})()"
            )
        url = json.dumps(cluster.url + "/health")
        asked = f"fetch({url}, {{ mode: 'no-cors' }}).then(() => 'got', () => 'blocked')"  # CORS aside
        assert await page.evaluate(asked) == "blocked"
        assert await page.evaluate("window.hit") is None


async def test_policies_in_training(tmp_path: Path) -> None:
    policies = [
        {"model": f"s:train:{number}", "tenant": "acme", "kind": "lora", "rank": 8, "state": "ready", "steps": 1200,
         "tokens": 3, "loss": 0.69314, "checkpoint": f"tinker://s:train:{number}/weights/v1"}
        for number in range(201)
    ]  # fmt: skip
    asked = Counter[str | None]()

    async def models(request: web.Request) -> web.Response:
        asked[request.headers.get("authorization")] += 1
        return web.json_response({"models": policies})

    app = web.Application()
    app.router.add_get("/models", models)
    trainer = web.AppRunner(app)
    await trainer.setup()
    with bound_socket() as listener:
        await web.SockSite(trainer, listener).start()
        address = TrainerAddress(f"http://127.0.0.1:{listener.getsockname()[1]}", SECRET)
        async with keyed_cluster(tmp_path, 0, 0, console=True, trainer=address) as keyed, browsing() as page:
            seen = Seen(page)
            await page.goto(f"{keyed.cluster.admin_url}/console")
            await open_view(page, "training")
            await shows(page, "#policy-rows", "s:train:1acmereadylora81,2000.69313weights/v1s:train:2")
            await shows(page, "#training-note", "1 older policies are not shown")
            assert asked.keys() == {f"Bearer {SECRET}"}
            policies[:] = [{**policies[0], "tenant": HOSTILE, "checkpoint": HOSTILE, "loss": None, "state": "broken"}]
            await until(
                page, f"document.querySelector('#policy-rows').textContent.split({json.dumps(HOSTILE)}).length === 3"
            )
            assert await page.evaluate("window.hit") is None
            await trainer.cleanup()
            await shows(page, "#training-note", "the trainer does not answer")
            seen.errors.clear()  # the browser logs the refused call
            check_origin(seen, f"{keyed.cluster.admin_url}/console")
            await page.goto(f"{keyed.cluster.url}/#/training")
            key, other = await keyed.key("acme", {Scope.ADMIN}), await keyed.key("acme", {Scope.INFER})
            for given, status in ((None, 401), (other, 403), (key, 503)):
                assert (await keyed.ask(given, "GET", "/console/policies"))[0] == status


async def test_with_the_keyboard_alone_and_a_key(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path, 1, 1, console=True, hosts=[OTHER_NAME]) as keyed, browsing() as page:
        seen = Seen(page)
        key = await keyed.key("acme", {Scope.ADMIN})
        await page.goto(f"{keyed.cluster.url}/")
        await shows(page, "#connection", "Waits for a key")
        assert not any("/v1/" in url or url.endswith("/state") for url in seen.urls)  # nothing to be refused
        assert await focused(page) == "key"
        await enter(page, "pk_wrong")
        await shows(page, "#connection", "key")
        await until(page, "document.querySelector('#connection').dataset.state === 'bad'")
        seen.errors.clear()  # the browser logs the refused calls
        await enter(page, key)
        await shows(page, "#connection", "Live")
        assert key not in await page.evaluate("document.documentElement.outerHTML + location.href + document.cookie")
        kept = await page.evaluate("[localStorage.length, sessionStorage.length, document.querySelector('#key').value]")
        assert kept == [0, 0, ""]
        assert not any(key in url for url in seen.urls)

        await tab_through(page, "Use", "forget", "tab-try")
        await page.keyboard.press("ArrowRight")  # around
        assert await focused(page) == "tab-fleet"
        await page.keyboard.press("ArrowRight")
        assert await focused(page) == "tab-adapters"
        assert await page.evaluate("document.querySelector('#adapters').hidden") is False
        await shows(page, "#adapter-rows", "acme/bot")
        await tab_through(page, "adapters", "prefix", "acme/bot")
        await page.keyboard.press("Enter")
        await shows(page, "#adapter-aliases", "@latest is r1")
        shown_at = await page.text_content("#connection")
        await until(page, f"document.querySelector('#connection').textContent !== {json.dumps(shown_at)}")
        assert await focused(page) == "acme/bot"  # an update leaves the focus where it is
        await tab_through(page, "prefix", "adapters", "tab-adapters", shift=True)
        await page.keyboard.press("End")
        assert await focused(page) == "tab-try"
        await tab_through(page, "try", "prompt")
        await page.keyboard.insert_text(" there")
        await tab_through(page, "try-kind", "try-tokens", "try-temperature", "send")
        await page.keyboard.press("Enter")
        await shows(page, "#try-note", "Both are done")
        await tab_through(page, "left-adapter")
        check_origin(seen, f"{keyed.cluster.url}/")

        await check_other_machine(keyed.cluster, page)
        await page.goto(f"{keyed.cluster.url}/")
        await shows(page, "#connection", "Waits for a key")  # it was in that page's memory only


async def check_other_machine(cluster: ClusterStandIn, page: Page) -> None:
    """Over plain HTTP from elsewhere the page takes no key."""
    port = cluster.admin_url.rpartition(":")[2]
    await page.goto(f"http://{OTHER_NAME}:{port}/console")
    await shows(page, "#key-note", "everybody on the way could read it")
    assert await page.evaluate("document.querySelector('#key-form').hidden")
    await shows(page, "#connection", "Live")


async def check_nothing_stays(page: Page) -> None:
    """Of what an administrator's key has shown, after the key is forgotten."""
    await shows(page, "#adapter-rows", "acme/bot")
    await choose(page, "acme/bot")
    await shows(page, "#adapter-aliases", "@latest is r1")
    await open_view(page, "try")
    await send(page, "my secret", "acme/bot", "")
    await shows(page, "#try-note", "Both are done")
    await shows(page, "#left-facts", "revision")
    await open_view(page, "adapters")
    await around_calls(  # the next answers come after the key has gone
        page,
        "const gate = new Promise((open) => window.open_gate = open); window.num_held = 0; let is_held = false",
        """is_held ||= url.endsWith("/state");
        const answer = await ask(url, ...rest);
        if (is_held) { window.num_held++; await gate }
        return answer""",
    )
    await until(page, "window.num_held === 2")  # the state, and the adapters
    await page.evaluate("document.querySelector('#forget').focus()")
    await page.keyboard.press(" ")
    await page.evaluate("window.open_gate()")
    await shows(page, "#connection", "Waits for a key")
    left = await page.evaluate("document.documentElement.outerHTML")
    assert not [secret for secret in ("acme", "bot", "my secret", "Hello", "p0", "d0", "r1<") if secret in left]
    assert await page.evaluate("[...document.querySelectorAll('tbody tr, #move-to option, path[d]')].length") == 0
    values = (
        "[...document.querySelectorAll('#prompt, #prefix, #left-adapter, #left-other, #key')].map((each) => each.value)"
    )
    assert await page.evaluate(values) == ["", "", "Hello", "", ""]
    assert [await page.text_content(f"#{name}-now") for name in ("tokens", "first", "flight", "workers")] == ["–"] * 4


async def test_without_management_the_models_are_paged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_pages, "MAX_PAGE", 1)

    async with keyed_cluster(tmp_path, 1, 1, management=False) as keyed, browsing() as page:
        seen = Seen(page)
        add(keyed.catalog, "cat", 2, tenant="acme")
        await page.goto(f"{keyed.cluster.admin_url}/console#/adapters")
        await shows(page, "#adapters-note", "needs an API key with the scope infer")
        await page.evaluate("document.querySelector('#key').focus()")
        await enter(page, await keyed.key("acme", {Scope.INFER}))
        await shows(page, "#adapter-rows", "acme/bot")
        await shows(page, "#adapters-note", "the prefix covers this page only")
        await page.click("#next-adapters")
        await shows(page, "#adapter-rows", "acme/cat")
        assert "acme/bot" not in await page.text_content("#adapter-rows")
        assert await page.evaluate("document.querySelector('#next-adapters').disabled")
        await page.click("#first-adapters")
        await shows(page, "#adapter-rows", "acme/bot")
        await around_calls(
            page,
            """const begun_at = performance.now(); window.num_states = window.num_lists = 0;
            window.too_many = () => window.num_lists > 1 + (performance.now() - begun_at) / 5000""",
            """window.num_states += url.endsWith("/state"); window.num_lists += url.includes("/v1/models");
            return ask(url, ...rest)""",
        )
        await until(page, "window.num_states >= 3")  # three quarters of a second each
        assert await page.evaluate("window.too_many()") is False

        # Of two routers behind one address, one after the other, no number is made.
        await shows(page, "#tokens-now", "0")
        await around_calls(
            page,
            "",
            """const answer = await ask(url, ...rest);
            if (!url.endsWith("/state")) return answer;
            return Response.json({ ...await answer.json(), router: `${performance.now()}` })""",
        )
        await shows(page, "#tokens-now", "–")
        await shows(page, "#flight-now", "0")
        assert seen.errors == []


async def test_a_router_that_stops_and_a_key_that_is_forgotten(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path, 1, 1, console=True) as keyed, browsing() as page:
        await page.goto(f"{keyed.cluster.url}/#/adapters")
        await enter(page, await keyed.key("acme", {Scope.ADMIN}))
        await shows(page, "#connection", "Live")
        await check_nothing_stays(page)
        assert await page.evaluate("document.querySelector('#forget').hidden")
        await page.evaluate("document.querySelector('#key').focus()")
        await enter(page, await keyed.key("acme", {Scope.ADMIN}))
        await shows(page, "#connection", "Live")
        keyed.cluster.server.should_exit = True
        await shows(page, "#connection", "The router does not answer")


@pytest.mark.parametrize("is_operator", [False, True])
async def test_a_first_request_is_one_press_and_its_command_does_the_same(tmp_path: Path, is_operator: bool) -> None:
    async with managing(1, 1, console=True) as cluster, browsing() as page:
        await imported(cluster, "a0")
        await upload(cluster, lora(tmp_path, 1), name="constructor")  # which every object of JavaScript has
        await imported(cluster, "everywhere")  # for unified workers, of which there is none: it is not offered
        await page.goto(f"{cluster.admin_url}/console#/try" if is_operator else f"{cluster.url}/")
        await until(page, "document.querySelector('#left-adapter').value === 'a0'")
        names = "[...document.querySelectorAll('#left-adapter option')].map((each) => each.textContent)"
        assert await page.evaluate(names) == ["base model", "a0", "constructor", "another…"]
        await page.click("#send")
        await shows(page, "#try-note", "Both are done")
        assert [await page.text_content(f"#{side}-answer") for side in ("left", "right")] == ["Hello wide world"] * 2
        assert [body["messages"] for body in cluster.prefill[0].engine.requests] == [
            [{"role": "user", "content": "Hello"}]
        ] * 2

        prompt = """It's "$HOME" `id`\n\\ !! é"""
        await fill(page, "prompt", prompt)
        await fill(page, "left-adapter", "constructor")
        await fill(page, "right-adapter", " nothing")
        await page.click("#left-copy")
        await until(page, "document.querySelector('#try-note').textContent.includes('opy')")
        command = await page.text_content("#curl")
        process = await asyncio.create_subprocess_exec("bash", "-c", command, stdout=-1, stderr=-1)
        output, errors = await process.communicate()
        assert b"wide" in output, errors
        assert output.endswith(b"data: [DONE]\n\n")
        await page.click("#send")
        await shows(page, "#try-note", "Done.")  # of one side alone
        by_command, by_page = cluster.prefill[0].engine.requests[2:]
        assert by_command["messages"] == [{"role": "user", "content": prompt}]
        assert {name for name in by_page if by_page[name] != by_command.get(name)} <= {"rid", "bootstrap_room"}

        # A choice outlives another list, without it.
        for gone in ("a0", "constructor"):
            assert (await ask(cluster, "DELETE", f"/v1/adapters/{gone}"))[0] == 200
        await upload(cluster, lora(tmp_path, 2), name="new")
        await page.evaluate("{ const now = performance.now.bind(performance); performance.now = () => now() + 60_000 }")
        await until(page, f"{names}.includes('new')")
        assert await page.evaluate(names) == ["base model", "constructor", "new", "another…"]
        assert await page.evaluate("document.querySelector('#left-adapter').value") == "constructor"


async def test_back_and_a_narrow_window(tmp_path: Path) -> None:
    shown = "[...document.querySelectorAll('[role=tabpanel]:not([hidden])')].map((each) => each.id).join()"
    long = f"{'t' * 63}/{'n-' * 31}n"
    async with managing(1, 1, console=True) as cluster, browsing() as page:
        seen = Seen(page)
        await upload(cluster, lora(tmp_path, 1), name=long)
        await page.set_viewport_size({"width": 420, "height": 800})
        await page.goto(f"{cluster.url}/")
        for view, content in (("fleet", "p0"), ("adapters", long), ("requests", ""), ("try", "")):
            await open_view(page, view)
            await until(page, f"{shown} === '{view}'")
            await shows(page, f"#{view}", content)
            assert await page.evaluate("document.documentElement.scrollWidth") == 420, view
            assert await page.evaluate("document.querySelector('#views').getBoundingClientRect().top") < 250
        for view in ("requests", "adapters"):
            await page.evaluate("window.history.back()")
            await until(page, f"{shown} === '{view}'")
        await choose(page, long)
        await shows(page, "#revision-rows", "r1")
        assert await page.evaluate("document.querySelector('[aria-pressed=true]').clientHeight") < 40  # one line
        await page.goto(f"{cluster.url}/#/nonsense")
        await until(page, f"{shown} === 'try'")
        await open_view(page, "fleet")
        await shows(page, "#worker-rows", "p0")
        heads = "[...document.querySelectorAll('#fleet thead th')].filter((each) => !each.hidden)"
        texts = await page.evaluate(f"{heads}.map((each) => each.textContent)")
        assert "Sequences" in texts
        assert "Domain" not in texts  # no worker has one
        check_origin(seen, f"{cluster.url}/")


async def test_aliases_move_and_revisions_are_uploaded(tmp_path: Path) -> None:
    async with managing(1, 1) as cluster, browsing() as page:
        seen = Seen(page)
        for seed in (1, 2):
            await upload(cluster, lora(tmp_path, seed), name="acme/poet")
        await page.goto(f"{cluster.admin_url}/console#/adapters")
        await shows(page, "#adapter-rows", "acme/poet")
        assert await page.evaluate("document.querySelector('#move-form').hidden")
        await choose(page, "acme/poet")
        await shows(page, "#adapter-aliases", "@latest is r2")
        await fill(page, "move-to", "r1")
        await page.click("#move-form [type=submit]")
        await shows(page, "#change-note", "acme/poet@latest is r1 now; it was r2.")
        await shows(page, "#adapter-aliases", "@latest is r1")
        await page.click("#roll-back")
        await shows(page, "#adapter-aliases", "@latest is r2")
        await fill(page, "move-alias", "prod")
        await page.click("#move-form [type=submit]")
        await shows(page, "#change-note", "acme/poet@prod is r1 now.")
        await shows(page, "#adapter-aliases", "@prod is r1")

        prod = "/v1/adapters/acme/poet/aliases/prod"
        assert (await ask(cluster, "PUT", prod, json={"weights": {"r1": 95, "r2": 5}}))[0] == 200
        await shows(page, "#adapter-aliases", "@prod is r1 95%, r2 5%")
        await shows(page, "#revision-rows", "@latest @prod")  # of both revisions
        await page.click("#move-form [type=submit]")
        await shows(page, "#change-note", "acme/poet@prod is r1 now; it was r1 95%, r2 5%.")
        await until(page, "document.querySelector('#adapter-aliases').textContent.endsWith('@prod is r1')")

        # Nothing is moved from where somebody else has moved it since it was shown.
        await around_calls(page, "", "return url.includes('/poet?') ? new Promise(() => {}) : ask(url, ...rest)")
        revision = {"revision": "r2"}
        assert (await ask(cluster, "PUT", prod, json=revision))[0] == 200
        await page.click("#move-form [type=submit]")
        await shows(page, "#change-note", "not at r1")
        assert (await ask(cluster, "GET", "/v1/adapters/acme/poet"))[1]["aliases"] == {"latest": 2, "prod": 2}
        seen.errors.clear()  # the browser logs the refused call

        await page.goto("about:blank")
        await page.goto(f"{cluster.admin_url}/console#/adapters")
        await until(page, "!document.querySelector('#upload-form').hidden")
        await fill(page, "upload-name", "acme/new")
        await page.set_input_files("#upload-files", sorted((tmp_path / "lora-1").iterdir()))
        await page.click("#upload-form [type=submit]")
        await shows(page, "#change-note", "acme/new@latest is r1 now.")
        await shows(page, "#revision-rows", id_of(tmp_path, 1)[7:19])
        check_origin(seen, f"{cluster.admin_url}/console", "about:blank")


async def test_a_tenants_key_has_what_its_scopes_allow(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path, 1, 1, console=True) as keyed, browsing() as page:
        await page.goto(f"{keyed.cluster.url}/")
        await shows(page, "#key-note", "adapters:read shows adapters")
        await shows(page, "#connection", "Waits for a key")
        assert await page.evaluate("document.querySelector('#tiles').hidden")
        await enter(page, await keyed.key("acme", {Scope.INFER, Scope.ADAPTERS_READ}))
        await shows(page, "#connection", "fleet and requests need the scope admin")
        assert await page.evaluate("document.querySelector('#connection').dataset.state") == "good"
        tabs = "[...document.querySelectorAll('[role=tab]')].filter((each) => !each.hidden).map((each) => each.id)"
        assert await page.evaluate(tabs) == ["tab-adapters", "tab-try"]
        await page.evaluate("document.querySelector('#tab-try').focus()")
        await page.keyboard.press("ArrowRight")
        assert await focused(page) == "tab-adapters"
        await page.keyboard.press("ArrowRight")
        await until(page, "document.querySelector('#left-adapter').value === 'acme/bot'")
        await page.click("#send")
        await shows(page, "#try-note", "Both are done")
        await page.click("#left-copy")
        await shows(page, "#curl", 'Authorization: Bearer $OPENAI_API_KEY"')
        await open_view(page, "adapters")
        await shows(page, "#adapter-rows", "acme/bot")
        await choose(page, "acme/bot")
        await until(page, "!document.querySelector('#move-form').hidden")
        await page.click("#roll-back")
        await shows(page, "#change-note", "adapters:write")
        hidden = "['move', 'upload'].every((name) => document.querySelector(`#${name}-form`).hidden)"
        assert await page.evaluate(hidden)
        await page.click("#forget")
        await page.evaluate("document.querySelector('#key').focus()")
        await enter(page, await keyed.key("acme", {Scope.ADMIN}))
        await shows(page, "#connection", "Live")
        assert await page.evaluate(tabs) == ["tab-fleet", "tab-adapters", "tab-requests", "tab-try"]
        await until(page, "!document.querySelector('#upload-form').hidden")
        await open_view(page, "try")
        await until(page, "document.querySelector('#left-adapter').value === 'acme/bot'")
