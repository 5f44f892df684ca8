"""A person logs in, opens the example DAG's form, fills it in and triggers the run, in a real browser.

The run asks for slices that do not exist, so it ends before it has started anything.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest

from raytpu_ops.demo.airflow import AirflowInstance
from raytpu_ops.demo.places import DAG_ID

if TYPE_CHECKING:
    from selenium.webdriver.remote.webdriver import WebDriver

CHROMEDRIVER = shutil.which("chromedriver")
WAIT_S = 90

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.browser,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMEDRIVER is None, reason="no chromedriver (Debian: apt-get install chromium-driver)"),
]


@pytest.fixture
def browser(short_dir: Path) -> Iterator[WebDriver]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    # --no-sandbox: Chromium has none for root, which CI is; it visits nothing but our own pages.
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1200"):
        options.add_argument(flag)
    # Chromium forgets some of its temporary files, and has sockets among them, whose paths must be short.
    service = webdriver.ChromeService(CHROMEDRIVER, env={**os.environ, "TMPDIR": str(short_dir)})
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def wait_for(browser: WebDriver, selector: str):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    def shown(driver: WebDriver):
        found = [e for e in driver.find_elements(By.CSS_SELECTOR, selector) if e.is_displayed() and e.is_enabled()]
        return found[0] if found else None

    return WebDriverWait(browser, WAIT_S).until(shown, f"nothing visible for {selector}")


def fill(browser: WebDriver, name: str, value: str) -> None:
    from selenium.webdriver.common.keys import Keys

    field = wait_for(browser, f"[role=dialog] input[name={name}]")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(value, Keys.TAB)


def trigger_button(browser: WebDriver):
    from selenium.webdriver.common.by import By

    buttons = browser.find_elements(By.CSS_SELECTOR, "[role=dialog] button")
    [button] = [button for button in buttons if button.text.strip() == "Trigger"]
    return button


def test_the_form_has_every_parameter_and_starts_the_run_that_was_asked_for(
    airflow_instance: AirflowInstance, browser: WebDriver
):
    api = airflow_instance.api
    api.wait_for_dag(DAG_ID)
    api.unpause(DAG_ID)
    browser.get(f"{airflow_instance.url}/dags/{DAG_ID}")
    wait_for(browser, "input[name=username]").send_keys(airflow_instance.username)
    wait_for(browser, "input[name=password]").send_keys(airflow_instance.password)
    wait_for(browser, "button[type=submit]").click()

    wait_for(browser, "button[aria-label='Trigger Dag']").click()
    wait_for(browser, "[role=dialog] input[name=element_topology]")
    shown = browser.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('[role=dialog] input[name^=element_]')]"
        ".map(e => [e.name.replace('element_', ''), e.value]))"
    )
    assert shown.pop("storage").startswith("/")
    assert shown == {"backend": "local", "generation": "v4", "topology": "2x2x2", "slices": "2", "epochs": "8"}

    fill(browser, "element_topology", "9x9x9")
    fill(browser, "element_slices", "1")
    fill(browser, "element_epochs", "3")
    button = trigger_button(browser)
    browser.execute_script("arguments[0].scrollIntoView()", button)
    button.click()

    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, WAIT_S).until(lambda driver: "/runs/" in driver.current_url, "the run's page never came")
    run_id = unquote(browser.current_url.split("/runs/")[1].split("/")[0].split("?")[0])
    run = api.wait_run(DAG_ID, run_id, deadline_s=180)
    asked = {name: run["conf"][name] for name in ("topology", "slices", "epochs", "generation", "backend")}
    assert asked == {"topology": "9x9x9", "slices": 1, "epochs": 3, "generation": "v4", "backend": "local"}
    assert run["state"] == "failed"
    log = "\n".join(api.last_log(DAG_ID, run_id, "plan"))
    assert "InvalidSpec: topology" in log
    assert "9x9x9" in log
