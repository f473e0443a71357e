"""Small models of the transformers library on a folder of the datasets library."""

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from runner.adapters.transformers import TransformersTask

SETTINGS = {"updates": 10, "global_batch_size": 32, "optimizer": "sgd", "optimizer.lr": 0.1, "scheduler": "constant"}
SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "use_cache": False,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def accuracy(result):
    return {"accuracy": float((result.predictions.argmax(-1) == result.label_ids).mean())}


def build(context, *, kind: str = "gpt2"):
    if kind == "gpt2":
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **SMALL))
        return TransformersTask(model, context.data_path)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **SMALL, num_labels=3))
    return TransformersTask(model, context.data_path, compute_metrics=accuracy)
