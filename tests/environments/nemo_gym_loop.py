"""Episodes of NeMo Gym's simple_agent with a script in place of the model. Run with the package's Python.

python nemo_gym_loop.py ROWS SCRIPTS   # prints the port of the resources server, then what was verified

ROWS is a JSON list, and SCRIPTS of each row the responses' outputs. Each line on stdin is replied to by
what was verified since the line before.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys

import uvicorn
from fastapi import FastAPI
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, set_global_aiohttp_client
from omegaconf import OmegaConf
from resources_servers.example_session_state_mgmt import app as counter
from responses_api_agents.simple_agent import app as agent
from starlette.responses import Response

VERIFIED = []
RUNNING = []


class Server(counter.StatefulCounterResourcesServer):
    def setup_webserver(self):
        app = super().setup_webserver()

        @app.middleware("http")
        async def record(request, call_next):
            if request.url.path == "/verify":
                given = json.loads(await request.body())
                response = await call_next(request)
                body = b"".join([part async for part in response.body_iterator])
                VERIFIED.append([given["response"]["output"], json.loads(body).get("reward")])
                return Response(body, response.status_code, dict(response.headers))
            return await call_next(request)

        return app


def model(scripts):
    app, turns = FastAPI(), (turn for script in scripts for turn in script)

    @app.post("/v1/responses")
    async def responses(body: dict):
        turn = next(turns)
        whole = {"id": "r", "object": "response", "created_at": 0, "model": "m", "output": turn["output"]}
        whole |= {"tools": [], "parallel_tool_calls": True, "tool_choice": "auto"}
        return whole | ({"incomplete_details": {"reason": "max_output_tokens"}} if turn["cut"] else {})

    return app


async def serve(app, port):
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    RUNNING.append(asyncio.create_task(server.serve()))
    while not server.started:
        await asyncio.sleep(0.01)


async def main(rows, scripts):
    rows, scripts = json.loads(rows), json.loads(scripts)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    place = {"host": "127.0.0.1", "entrypoint": "app.py", "domain": "other"}
    names = {"counter": "resources_servers", "model": "responses_api_models", "agent": "responses_api_agents"}
    config = {
        name: {kind: {name: {**place, "port": port}}}
        for (name, kind), port in zip(names.items(), ports, strict=True)
    }
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create(config),
    )
    kind = counter.StatefulCounterResourcesServerConfig
    server = Server(config=kind(name="counter", port=ports[0], **place), server_client=client)
    given = {"resources_server": {"type": "resources_servers", "name": "counter"}}
    given |= {"model_server": {"type": "responses_api_models", "name": "model"}}
    own = agent.SimpleAgentConfig(name="agent", port=ports[2], **place, **given)
    player = agent.SimpleAgent(config=own, server_client=client)
    # On one event loop, as NeMo Gym's client is one for all.
    apps = server.setup_webserver(), model(scripts), player.setup_webserver()
    for app, port in zip(apps, ports, strict=True):
        await serve(app, port)
    set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    for row in rows:
        response = await client.post(server_name="agent", url_path="/run", json=row)
        assert response.ok, await response.text()
    print(json.dumps(ports[0]), flush=True)
    print(json.dumps(VERIFIED), flush=True)
    VERIFIED.clear()
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(VERIFIED), flush=True)
        VERIFIED.clear()
    os._exit(0)


asyncio.run(main(*sys.argv[1:]))
