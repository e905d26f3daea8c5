// Trains an adapter to answer a question and streams its answer, with the code that `buf generate` writes to gen.
// See docs/languages.md for how to build it.
//   TWINKLE_SERVER_URL=127.0.0.1:PORT TWINKLE_API_KEY=tml-... build/client
#include <google/rpc/error_details.pb.h>
#include <google/rpc/status.pb.h>
#include <grpcpp/grpcpp.h>
#include <openssl/sha.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "twinkle/api/data/v1/dataset_service.grpc.pb.h"
#include "twinkle/api/data/v1/loader_service.grpc.pb.h"
#include "twinkle/api/model/v1/adapter_service.grpc.pb.h"
#include "twinkle/api/model/v1/training_service.grpc.pb.h"
#include "twinkle/api/sampler/v1/sampler_service.grpc.pb.h"
#include "twinkle/api/server/v1/server_service.grpc.pb.h"

namespace data = twinkle::api::data::v1;
namespace model = twinkle::api::model::v1;
namespace sampler = twinkle::api::sampler::v1;
namespace server = twinkle::api::server::v1;
using namespace std::chrono_literals;
using Channel = std::shared_ptr<grpc::Channel>;

constexpr int kSteps = 16;
// The file of this program is small; chunks of 1 MiB are recommended.
constexpr std::size_t kChunkBytes = 64;
const std::string kQuestion = "Who are you?";
const std::string kAnswer = "I am Twinkle, and I train models.";
const std::string kRows = R"({"messages":[{"role":"user","content":")" + kQuestion +
                          R"("},{"role":"assistant","content":")" + kAnswer + "\"}]}\n";

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The context of one call: the key and a deadline, because gRPC waits forever without one.
class Context : public grpc::ClientContext {
 public:
  explicit Context(std::chrono::milliseconds timeout = 60s) {
    AddMetadata("authorization", "Bearer " + Variable("TWINKLE_API_KEY"));
    set_deadline(std::chrono::system_clock::now() + timeout);
  }
};

void Check(const grpc::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.error_message());
}

std::string NewId() {
  std::random_device random;
  std::ostringstream id;
  for (int word = 0; word < 4; ++word) id << std::hex << std::setw(8) << std::setfill('0') << random();
  return id.str();
}

// Opens a channel, which verifies the server with the authorities of a PEM file, if one is given.
Channel Connect(const std::string& address, const std::string& authority) {
  if (authority.empty()) return grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  std::ifstream file(authority);
  grpc::SslCredentialsOptions options;
  options.pem_root_certs.assign(std::istreambuf_iterator<char>(file), {});
  return grpc::CreateChannel(address, grpc::SslCredentials(options));
}

std::vector<std::string> TrainableModels(const Channel& channel) {
  Context context;
  server::GetServerInfoResponse response;
  Check(server::ServerService::NewStub(channel)->GetServerInfo(&context, {}, &response));
  std::vector<std::string> names;
  for (const auto& service : response.services()) {
    for (const auto& item : service.base_models()) {
      if (item.is_trainable()) names.push_back(item.base_model());
    }
  }
  return names;
}

// Uploads a file as a header and chunks, and returns the id of the upload.
std::string Upload(data::DatasetService::Stub& datasets, const std::string& file) {
  Context context;
  data::UploadResponse response;
  auto writer = datasets.Upload(&context, &response);
  data::UploadRequest first;
  first.mutable_header()->set_upload_id(NewId());
  first.mutable_header()->set_size_bytes(file.size());
  std::string* digest = first.mutable_header()->mutable_sha256();
  digest->resize(SHA256_DIGEST_LENGTH);
  SHA256(reinterpret_cast<const unsigned char*>(file.data()), file.size(),
         reinterpret_cast<unsigned char*>(digest->data()));
  // Write returns false if the server ended the call. Finish then returns its error.
  bool is_open = writer->Write(first);
  for (std::size_t offset = 0; is_open && offset < file.size(); offset += kChunkBytes) {
    data::UploadRequest next;
    next.mutable_chunk()->set_offset(offset);
    next.mutable_chunk()->set_data(file.substr(offset, kChunkBytes));
    is_open = writer->Write(next);
  }
  writer->WritesDone();
  Check(writer->Finish());
  std::cout << "uploaded: " << response.committed_bytes() << std::endl;
  return response.upload_id();
}

// Prepares training batches on the server, which tokenizes the chats, and returns the id of their loader.
std::string OpenLoader(const Channel& channel, const std::string& base_model) {
  auto datasets = data::DatasetService::NewStub(channel);
  data::CreateDatasetRequest dataset;
  dataset.set_request_id(NewId());
  dataset.mutable_source()->mutable_upload()->set_upload_id(Upload(*datasets, kRows));
  dataset.mutable_source()->mutable_upload()->set_format(data::FILE_FORMAT_JSONL);
  dataset.add_steps()->mutable_set_template()->set_base_model(base_model);
  dataset.add_steps()->mutable_encode();
  Context creation;
  data::CreateDatasetResponse created;
  Check(datasets->CreateDataset(&creation, dataset, &created));

  data::OpenLoaderRequest loader;
  loader.set_request_id(NewId());
  loader.set_dataset_id(created.dataset().dataset_id());
  loader.set_batch_size(1);
  Context opening;
  data::OpenLoaderResponse opened;
  Check(data::LoaderService::NewStub(channel)->OpenLoader(&opening, loader, &opened));
  return opened.loader().loader_id();
}

grpc::Status CreateAdapter(model::AdapterService::Stub& adapters, const std::string& base_model, int rank,
                           model::CreateAdapterResponse* response) {
  Context context;
  model::CreateAdapterRequest request;
  request.set_request_id(NewId());
  request.set_base_model(base_model);
  request.mutable_lora_config()->set_lora_rank(rank);
  return adapters.CreateAdapter(&context, request, response);
}

std::vector<model::TrainRequest> Operations(const std::string& adapter_id, const std::string& loader_id) {
  std::vector<model::TrainRequest> all(2 * kSteps + 1);
  for (int index = 0; index < 2 * kSteps; index += 2) {
    // Without a cursor, each step reads the first batch.
    auto* verb = all[index].mutable_operation()->mutable_forward_backward();
    verb->mutable_batch()->mutable_loader()->set_loader_id(loader_id);
    all[index + 1].mutable_operation()->mutable_clip_grad_and_step()->set_learning_rate(0.005);
  }
  all.back().mutable_operation()->mutable_publish_version();
  for (std::size_t index = 0; index < all.size(); ++index) {
    all[index].mutable_operation()->set_adapter_id(adapter_id);
    all[index].mutable_operation()->set_sequence_number(index + 1);
  }
  return all;
}

// Trains the adapter with one stream, and returns the version that it publishes at the end.
std::int64_t Train(const Channel& channel, const std::string& adapter_id, const std::string& loader_id) {
  Context context;
  auto stream = model::TrainingService::NewStub(channel)->Train(&context);
  // Operations run in the order of their numbers. They are sent without waiting, so that the model is never idle.
  std::thread sender([&] {
    for (const auto& request : Operations(adapter_id, loader_id)) {
      if (!stream->Write(request)) return;  // Finish returns the error of the stream.
    }
    stream->WritesDone();
  });
  std::int64_t version = 0;
  std::ostringstream losses;
  std::string failure;
  losses << std::fixed << std::setprecision(3);
  for (model::TrainResponse response; stream->Read(&response);) {
    const auto& result = response.result();
    if (result.has_error() && failure.empty()) failure = result.error().message();
    if (result.has_forward()) losses << ' ' << result.forward().loss() / result.forward().label_count();
    if (result.has_publish()) version = result.publish().version();
  }
  sender.join();
  Check(stream->Finish());
  if (!failure.empty()) throw std::runtime_error("an operation failed: " + failure);
  std::cout << "losses:" << losses.str() << std::endl;
  return version;
}

// Returns a request that asks the question of the base model.
sampler::SampleRequest Question(const std::string& base_model) {
  sampler::SampleRequest request;
  request.set_base_model(base_model);
  auto* message = request.mutable_prompt()->mutable_chat()->mutable_trajectory()->add_messages();
  message->set_role(data::ROLE_USER);
  message->add_parts()->set_text(kQuestion);
  return request;
}

void Sample(sampler::SamplerService::Stub& samplers, const sampler::SampleRequest& request) {
  Context context;
  auto reader = samplers.Sample(&context, request);
  std::string text;
  for (sampler::SampleResponse response; reader->Read(&response);) {
    text += response.delta().text() + response.finished().text();
  }
  Check(reader->Finish());
  std::cout << "sampled: " << text << std::endl;
}

// Prints the reason and the field of an error.
void PrintRefusal(const grpc::Status& status) {
  google::rpc::Status decoded;
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest request;
  decoded.ParseFromString(status.error_details());
  for (const auto& detail : decoded.details()) {
    // UnpackTo returns false for a detail of another type.
    detail.UnpackTo(&info) || detail.UnpackTo(&request);
  }
  std::cout << "refused: " << info.reason() << ' ' << request.field_violations(0).field() << std::endl;
}

std::string NameOf(const grpc::Status& status) {
  if (status.error_code() == grpc::StatusCode::CANCELLED) return "CANCELLED";
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) return "DEADLINE_EXCEEDED";
  return "status " + std::to_string(status.error_code());
}

// Watches the load, which never ends, until the deadline of the call.
std::string StatusAtDeadline(sampler::SamplerService::Stub& samplers) {
  Context context(500ms);
  auto reader = samplers.WatchLoad(&context, {});
  for (sampler::WatchLoadResponse response; reader->Read(&response);) {
  }
  return NameOf(reader->Finish());
}

// Cancels a long answer after its first tokens. Cancelling a call also ends its work at the sampler.
std::string StatusAfterCancel(sampler::SamplerService::Stub& samplers, sampler::SampleRequest request) {
  Context context;
  request.mutable_params()->set_is_eos_ignored(true);
  auto reader = samplers.Sample(&context, request);
  for (sampler::SampleResponse response; reader->Read(&response);) context.TryCancel();
  return NameOf(reader->Finish());
}

void Run() {
  const Channel channel = Connect(Variable("TWINKLE_SERVER_URL"), Variable("TWINKLE_CA"));
  const auto models = TrainableModels(channel);
  std::cout << "models:";
  for (const auto& name : models) std::cout << ' ' << name;
  std::cout << std::endl;
  const std::string chosen = Variable("TWINKLE_MODEL");
  const std::string base_model = chosen.empty() ? models.at(0) : chosen;

  const std::string loader_id = OpenLoader(channel, base_model);
  auto adapters = model::AdapterService::NewStub(channel);
  model::CreateAdapterResponse created;
  Check(CreateAdapter(*adapters, base_model, 8, &created));
  const std::string& adapter_id = created.adapter().adapter_id();
  const std::int64_t version = Train(channel, adapter_id, loader_id);

  auto samplers = sampler::SamplerService::NewStub(channel);
  sampler::SampleRequest request = Question(base_model);
  request.mutable_adapter()->set_adapter_id(adapter_id);
  request.mutable_adapter()->set_exact(version);
  request.mutable_params()->set_max_tokens(40);
  request.mutable_params()->set_temperature(0);
  Sample(*samplers, request);

  PrintRefusal(CreateAdapter(*adapters, base_model, -1, &created));
  std::cout << "deadline: " << StatusAtDeadline(*samplers) << std::endl;
  std::cout << "cancelled: " << StatusAfterCancel(*samplers, Question(base_model)) << std::endl;
}

int main() {
  try {
    Run();
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
