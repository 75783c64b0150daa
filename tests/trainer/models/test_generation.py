"""An export ends where its run taught it to, samples as its model did, and keeps that model's own ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.configs import config_of
from tests.support.tiny import ALONE, tiny_shape
from trainer.commands.export import export
from trainer.config.load import config_to_yaml
from trainer.data.tokenize.ends import end_of_turn
from trainer.data.tokenize.tokenizer import END_OF_TEXT, TURN_END, build_bytes_tokenizer
from trainer.errors import ModelError
from trainer.export.generation import generation_of
from trainer.export.model import write_export
from trainer.models.families.decoder_shape import model_folder
from trainer.models.hf import init_random
from trainer.recipes import sft
from trainer.schema import Config

SHAPE = tiny_shape(vocab_size=260, tie_embeddings=False)
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def base_tokenizer() -> Any:
    """As base models have it: turns end in one token, texts in another, which is its eos."""
    tokenizer = build_bytes_tokenizer()
    tokenizer.eos_token = END_OF_TEXT
    return tokenizer


def id_of(token: str) -> int:
    return int(build_bytes_tokenizer().convert_tokens_to_ids(token))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says the end of a turn after whatever it reads."""
    folder = tmp_path_factory.mktemp("generation") / "base"
    model = SHAPE.build()
    init_random(model, 0)
    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            tensor.zero_()
    tensors["model.embed_tokens.weight"].fill_(1.0)
    tensors["lm_head.weight"][id_of(TURN_END)] = 1.0
    write_export(folder, SHAPE, tensors=tensors, tokenizer=base_tokenizer())
    values = {"bos_token_id": 5, "eos_token_id": [id_of(END_OF_TEXT), 7], "max_new_tokens": 30, **SAMPLING}
    (folder / "generation_config.json").write_text(json.dumps({**values, "transformers_version": "4.37.0"}))
    return folder


def config(base: Path, **sections: dict[str, Any]) -> Config:
    data = {"train": [str(base.parent / "rows.jsonl")], "seq_len": 64, "eval_fraction": 0}
    return config_of(
        model={"name": str(base)},
        lora=sections.get("lora", {}),
        data={**data, **sections.get("data", {})},
        optim={"learning_rate": 1e-9, "warmup_steps": 0},
        train={"steps": 1, "micro_batch_size": 2, "save_every": 1},
        run={"export": True},
    )


def said(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "generation_config.json").read_text())


def answer(folder: Path) -> list[int]:
    """What transformers generates from the folder alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (model.generation_config.temperature, model.generation_config.top_k) == (0.7, 20)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], return_tensors="pt", return_dict=True)
    out = model.generate(**ids, do_sample=False, repetition_penalty=1.0, max_new_tokens=12)
    return out[0, ids["input_ids"].shape[1] :].tolist()


@pytest.mark.filterwarnings("ignore")
def test_run_merge_and_export_of_a_checkpoint_end_where_the_run_taught_to(base: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{number}?", "answer": "na"} for number in range(4)]
    (base.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = {"bos_token_id": 5, "eos_token_id": [id_of(TURN_END), id_of(END_OF_TEXT), 7], **SAMPLING}
    expected |= {"pad_token_id": id_of("<|pad|>"), "max_new_tokens": 30}
    for name, lora in (("full", {}), ("lora", {"rank": 2, "merge_export": True})):
        run = tmp_path / name
        run.mkdir()
        wanted = config(base, lora=lora)
        (run / "config.yaml").write_text(config_to_yaml(wanted))
        assert sft.run(wanted, run, ALONE) == 0
        options = ["--merge"] if lora else []
        result = CliRunner().invoke(export, [str(run), "--out", str(run / "again"), *options])
        assert result.exit_code == 0, (result.output, result.exception)
        folders = [run / "export", run / "again", *([run / "export" / "adapter"] if lora else [])]
        assert [said(folder) for folder in folders] == [expected] * len(folders)
        assert answer(run / "export") == [id_of(TURN_END)]
    kept = json.loads((tmp_path / "full" / "export" / "config.json").read_text())
    assert (kept["eos_token_id"], kept["bos_token_id"]) == (expected["eos_token_id"], 5)
    assert "im_start" in (tmp_path / "full" / "export" / "chat_template.jinja").read_text()


@pytest.mark.filterwarnings("ignore")
def test_base_itself_does_not_end_there(base: Path) -> None:
    """What the test above rests on."""
    assert answer(base) == [id_of(TURN_END)] * 12


@pytest.mark.parametrize(("template", "end"), [(None, TURN_END), (PLAIN, TURN_END), (ENDLESS, None)])
def test_end_of_a_turn_is_the_template_s(template: str | None, end: str | None) -> None:
    tokenizer = base_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    assert end_of_turn(tokenizer) == (None if end is None else id_of(end))
    tokenizer.chat_template = None
    assert end_of_turn(tokenizer) is None


def test_pretraining_teaches_the_end_of_a_text(base: Path) -> None:
    wanted = config_of(recipe="pretrain", model={"name": str(base)}, data={"train": ["builtin:python"]})
    assert generation_of(wanted, base_tokenizer(), 260, tell=print)["eos_token_id"] == [id_of(END_OF_TEXT), 7]


def test_ids_of_another_vocabulary_are_not_taken_over(base: Path) -> None:
    wanted = config(base, data={"tokenizer": "builtin:bytes"})
    found = generation_of(wanted, base_tokenizer(), 260, tell=print)
    assert (found["eos_token_id"], found["temperature"]) == ([id_of(TURN_END), id_of(END_OF_TEXT)], 0.7)
    assert "bos_token_id" not in found


def test_model_that_is_gone_costs_its_values_and_a_line(tmp_path: Path) -> None:
    told: list[str] = []
    found = generation_of(config(tmp_path / "gone"), base_tokenizer(), 260, tell=told.append)
    assert found["eos_token_id"] == [id_of(TURN_END), id_of(END_OF_TEXT)]
    assert told == [f"note: the export has no sampling values of {tmp_path / 'gone'}: its folder is not here"]


@pytest.mark.parametrize(
    ("text", "told"),
    [("[]", "it is [], not an object"), ('{"eos_token_id": "x"}', "eos_token_id is 'x', not a whole number or a list")],
)
def test_damaged_generation_config_is_told_before_the_first_step(
    base: Path, tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / "config.json").write_text((base / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        model_folder(str(tmp_path), ALONE)
    assert str(caught.value).startswith(f"{tmp_path / 'generation_config.json'}: {told}")
